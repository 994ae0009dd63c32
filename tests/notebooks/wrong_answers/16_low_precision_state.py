"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_smallest_update": [
        ("bound = 2**-8", "the whole distance"),
        ("bound = 2**-7", "Between 0.5 and 1, the spacing is smaller"),
        ("bound = 1e-4", "which is a little larger than your number, does not change"),
        ("bound = 0.75", "which is a little smaller than your number, already changes"),
    ],
    "check_round_stochastically": [
        (
            "def round_stochastically(values):\n    return values.round()",
            "The mean of 20,000 rounded values",
        ),
        (
            "def round_stochastically(values):\n"
            "    return (values + 2 * torch.rand_like(values)).floor()",
            "This is not one of the two integers next",
        ),
        (
            "def round_stochastically(values):\n"
            "    return values.floor() + torch.randint_like(values, 2)",
            "The mean of 20,000 rounded values",
        ),
    ],
    "check_bytes": [
        ("bytes_each = 8", "Add the scales"),
        (
            "bytes_each = 2 + 2 + 2 + 2 * (1 + 4)",
            "256 values share a scale, so it adds 4 / 256 bytes",
        ),
        ("bytes_each = 2 + 2 + 2 + 1 + 4 / 256", "Adam has two"),
        (
            "bytes_each = 2 + 2 + 2 * (1 + 4 / 256)",
            "Count three bf16 numbers, and two moments with their scales",
        ),
    ],
    "check_store_squares": [
        (
            "def store_squares(rows):\n"
            "    step = rows.amax(1, keepdim=True) / 256\n"
            "    return (rows / step).round() * step",
            "squares become 0 or negative",
        ),
        (
            "def store_squares(rows):\n"
            "    step = rows.max() / 256\n"
            "    return (rows / step).round().clamp(min=1) * step",
            "A square becomes larger than the largest square in its row",
        ),
        (
            "def store_squares(rows):\n"
            "    step = rows.amax(1, keepdim=True) / 15\n"
            "    return (rows / step).round().clamp(min=1) * step",
            "steps, but rounding to nearest gives at most half a step",
        ),
    ],
}
