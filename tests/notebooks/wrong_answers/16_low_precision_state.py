"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_smallest_update": [
        ("bound = 2**-8", "the whole distance"),
        ("bound = 2**-7", "follows from the spacing at 1"),
        ("bound = 1e-4", "a little more than your bound, is rounded away"),
        ("bound = 0.75", "moves the weight already"),
    ],
    "check_round_stochastically": [
        ("def round_stochastically(values):\n    return values.round()", "on average"),
        (
            "def round_stochastically(values):\n"
            "    return (values + 2 * torch.rand_like(values)).floor()",
            "not one of the two whole numbers",
        ),
        (
            "def round_stochastically(values):\n"
            "    return values.floor() + torch.randint_like(values, 2)",
            "on average",
        ),
    ],
    "check_bytes": [
        ("bytes_each = 8", "Add the scales"),
        ("bytes_each = 2 + 2 + 2 + 2 * (1 + 4)", "costs a value 4 / 256 bytes"),
        ("bytes_each = 2 + 2 + 2 + 1 + 4 / 256", "Adam has two"),
        ("bytes_each = 2 + 2 + 2 * (1 + 4 / 256)", "It is not 6.03125"),
    ],
    "check_store_squares": [
        (
            "def store_squares(rows):\n"
            "    step = rows.amax(1, keepdim=True) / 256\n"
            "    return (rows / step).round() * step",
            "become 0 or less",
        ),
        (
            "def store_squares(rows):\n"
            "    step = rows.max() / 256\n"
            "    return (rows / step).round().clamp(min=1) * step",
            "larger than the largest of its row",
        ),
        (
            "def store_squares(rows):\n"
            "    step = rows.amax(1, keepdim=True) / 15\n"
            "    return (rows / step).round().clamp(min=1) * step",
            "steps off",
        ),
    ],
}
