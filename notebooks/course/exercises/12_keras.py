"""Checks for notebook 12, Train with dtype policies in Keras; it loads Keras when it is asked."""

from collections.abc import Callable, Sequence
from typing import Any

from course.exercises import call, exercise, need


@exercise
def check_variable_bytes(sizes: Sequence[float]) -> str:
    """The bytes of 1000 weights under mixed_float16 and under float16."""
    import keras

    need(
        isinstance(sizes, list | tuple) and len(sizes) == 2,
        f"The answer is two numbers in brackets, but you gave {sizes!r}.",
    )
    width = {"float32": 4, "float16": 2}
    policies = [keras.DTypePolicy(name) for name in ("mixed_float16", "float16")]
    mixed, pure = (1000 * width[policy.variable_dtype] for policy in policies)
    need(
        sizes[0] == mixed,
        f"{sizes[0]} is not the first number. In which dtype does the policy *store* the weights?",
    )
    need(
        sizes[1] == pure,
        f"The first number is right, but {sizes[1]} is not the size under float16.",
    )
    return "A mixed policy stores master weights in float32, but float16 does not."


@exercise
def check_step_length(length: float) -> str:
    """How far SGD moves a weight if a gradient of 0.5 is divided by the scale of 1024 twice."""
    scale, true_gradient = 1024, 0.5
    moved = true_gradient / scale  # `apply` divides what it is given, whatever that is
    need(length != 0.5, "0.5 would be right if `apply` did not divide by the scale again.")
    need(
        length != 512,
        "Your code has already divided the gradient by the scale, so it is no "
        "longer 1024 times too large.",
    )
    need(
        abs(length - moved) < 1e-3 * moved,
        f"{length:g} is wrong. You pass 0.5 to `apply`. What does `apply` do with it?",
    )
    return (
        f"The weight moves by {moved:.3g}. This is 1024 times too little, but no error tells you."
    )


@exercise
def check_last_layer(make: Callable[..., Any]) -> str:
    """A last layer for ten classes that is safe under mixed_float16."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        layer = call(make)
        need(isinstance(layer, keras.layers.Dense), "Return a Dense layer.")
        found = keras.backend.standardize_dtype(layer(keras.ops.ones((2, 4))).dtype)
    finally:
        keras.config.set_dtype_policy(before)
    need(
        found == "float32",
        f"Under mixed_float16, this layer returns {found}. The loss is then computed in too "
        "few bits.",
    )
    need(layer.units == 10, f"There are ten classes, but this layer has {layer.units} outputs.")
    need(
        layer.activation is keras.activations.linear,
        "The layer returns float32, but not logits. `from_logits=True` expects outputs "
        "without an activation.",
    )
    return "The layer returns ten logits in float32 under every policy."


@exercise
def check_compiled(compile_it: Callable[..., Any]) -> str:
    """A model whose layers alone have mixed_float16, compiled with a loss scale."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        dense = keras.layers.Dense(2, dtype="mixed_float16")
        model = keras.Sequential([keras.layers.Input((4,)), dense])
        call(compile_it, model)
    finally:
        keras.config.set_dtype_policy(before)
    need(getattr(model, "optimizer", None) is not None, "The model is not compiled.")
    scaled = keras.optimizers.LossScaleOptimizer
    need(
        isinstance(model.optimizer, scaled),
        f"The optimizer is {type(model.optimizer).__name__} and has no loss scale. The policy "
        "of the model is float32, so `compile` adds no loss scale.",
    )
    need(
        isinstance(model.optimizer.inner_optimizer, keras.optimizers.Adam),
        "There is a loss scale, but the optimizer inside is not Adam.",
    )
    return "Adam has a loss scale, although the policy of the model is float32."
