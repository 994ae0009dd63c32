"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_first_missing": [
        ("first_missing_in_bf16 = 256", "bf16 does hold 256"),
        ("first_missing_in_bf16 = 2049", "a smaller number is missing"),
        ("first_missing_in_bf16 = 2.5", "a positive whole number"),
    ],
    "check_sum_stops": [
        ("sum_stops_at = 128", "the sum still grows there"),
        ("sum_stops_at = 1000", "never gets as far as 1000"),
    ],
    "check_length": [
        (
            "def length(vector):\n    return (vector * vector).float().sum().sqrt()",
            "something overflows before the cast",
        ),
        (
            "def length(vector):\n    wide = vector.bfloat16()\n"
            "    return (wide * wide).sum().sqrt().float()",
            "a rounding to 16 bits",
        ),
    ],
    "check_largest_scale": [
        ("def largest_scale(gradients):\n    return 65504 / gradients.abs().max()", "power of two"),
        (
            "def largest_scale(gradients):\n"
            "    return 2.0 ** math.floor(math.log2(65504 / gradients.max()))",
            "with either sign",
        ),
        ("def largest_scale(gradients):\n    return 2.0**-2", "twice as much would still fit"),
    ],
}
