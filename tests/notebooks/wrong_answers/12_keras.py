"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_variable_bytes": [
        ("sizes = (2000, 2000)", "In which dtype does the policy *store* the weights?"),
        ("sizes = (4000, 4000)", "is not the size under float16"),
        ("sizes = 4000", "two numbers"),
    ],
    "check_step_length": [
        ("step_length = 0.5", "0.5 would be right if `apply` did not divide by the scale"),
        ("step_length = 512", "Your code has already divided the gradient by the scale"),
        ("step_length = 0.25", "What does `apply` do with it?"),
    ],
    "check_last_layer": [
        ("def last_layer():\n    return layers.Dense(10)", "returns float16"),
        (
            "def last_layer():\n    return layers.Dense(10, activation='softmax', dtype='float32')",
            "`from_logits=True` expects outputs without an activation",
        ),
    ],
    "check_compiled": [
        (
            "def compile_scaled(model):\n"
            "    model.compile(keras.optimizers.Adam(), loss='mse', auto_scale_loss=True)\n",
            "The policy of the model is float32, so `compile` adds no loss",
        ),
        (
            "def compile_scaled(model):\n"
            "    inner = keras.optimizers.SGD()\n"
            "    model.compile(keras.optimizers.LossScaleOptimizer(inner), loss='mse')\n",
            "There is a loss scale, but the optimizer inside is not Adam",
        ),
    ],
}
