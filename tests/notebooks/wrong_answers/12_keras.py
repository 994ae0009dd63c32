"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_variable_bytes": [
        ("sizes = (2000, 2000)", "what dtype the policy *keeps*"),
        ("sizes = (4000, 4000)", "not what float16 keeps"),
        ("sizes = 4000", "two numbers"),
    ],
    "check_step_length": [
        ("step_length = 0.5", "once more"),
        ("step_length = 512", "unscaled by hand"),
        ("step_length = 0.25", "what does `apply` do"),
    ],
    "check_last_layer": [
        ("def last_layer():\n    return layers.Dense(10)", "returns float16"),
        (
            "def last_layer():\n    return layers.Dense(10, activation='softmax', dtype='float32')",
            "no logits",
        ),
    ],
    "check_compiled": [
        (
            "def compile_scaled(model):\n"
            "    model.compile(keras.optimizers.Adam(), loss='mse', auto_scale_loss=True)\n",
            "without a loss scale",
        ),
        (
            "def compile_scaled(model):\n"
            "    inner = keras.optimizers.SGD()\n"
            "    model.compile(keras.optimizers.LossScaleOptimizer(inner), loss='mse')\n",
            "not around Adam",
        ),
    ],
}
