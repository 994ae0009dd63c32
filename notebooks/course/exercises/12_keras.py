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
        f"The answer is two numbers in brackets; this is {sizes!r}.",
    )
    width = {"float32": 4, "float16": 2}
    policies = [keras.DTypePolicy(name) for name in ("mixed_float16", "float16")]
    mixed, pure = (1000 * width[policy.variable_dtype] for policy in policies)
    need(
        sizes[0] == mixed,
        f"{sizes[0]} is not the first: ask what dtype the policy *keeps*, not what it computes in.",
    )
    need(sizes[1] == pure, f"The first is right, but {sizes[1]} is not what float16 keeps.")
    return "A mixed policy keeps master weights in float32; float16 keeps none."


@exercise
def check_step_length(length: float) -> str:
    """How far SGD moves a weight if a gradient of 0.5 is divided by the scale of 1024 twice."""
    scale, true_gradient = 1024, 0.5
    moved = true_gradient / scale  # `apply` divides what it is given, whatever that is
    need(length != 0.5, "That would be right if `apply` did not divide by the scale once more.")
    need(
        length != 512, "The gradient was unscaled by hand, so it is no longer 1024 times as large."
    )
    need(
        abs(length - moved) < 1e-3 * moved,
        f"{length:g} is not it: what does `apply` do to the 0.5 that it is given?",
    )
    return f"The weight moves by {moved:.3g}, 1024 times too little, and nothing complains."


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
        f"Under mixed_float16 this layer returns {found}, in which the loss loses its digits.",
    )
    need(layer.units == 10, f"There are ten classes; this layer has {layer.units} outputs.")
    need(
        layer.activation is keras.activations.linear,
        "It returns float32, but no logits: `from_logits=True` expects them without activation.",
    )
    return "It returns ten logits in float32, whatever the policy is."


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
    need(getattr(model, "optimizer", None) is not None, "The model has not been compiled.")
    scaled = keras.optimizers.LossScaleOptimizer
    need(
        isinstance(model.optimizer, scaled),
        f"The optimizer is {type(model.optimizer).__name__} without a loss scale: the model's own "
        "policy is float32, so `compile` adds none.",
    )
    need(
        isinstance(model.optimizer.inner_optimizer, keras.optimizers.Adam),
        "There is a loss scale, but not around Adam.",
    )
    return "Adam has a loss scale, although the model's own policy is float32."
