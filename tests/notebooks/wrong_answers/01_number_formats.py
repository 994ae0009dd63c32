"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_first_missing": [
        (
            "first_missing_in_bf16 = 256",
            "Find the first number that is not a multiple of the spacing",
        ),
        (
            "first_missing_in_bf16 = 2049",
            "From which power of two on is the spacing larger than 1?",
        ),
        ("first_missing_in_bf16 = 2.5", "a positive whole number"),
    ],
    "check_sum_stops": [
        ("sum_stops_at = 128", "the sum still grows there"),
        ("sum_stops_at = 1000", "It stops growing at a smaller power of two"),
    ],
    "check_length": [
        (
            "def length(vector):\n    return (vector * vector).float().sum().sqrt()",
            "What is the largest number that you compute in fp16?",
        ),
        (
            "def length(vector):\n    wide = vector.bfloat16()\n"
            "    return (wide * wide).sum().sqrt().float()",
            "a value is still rounded to 16 bits",
        ),
    ],
    "check_largest_scale": [
        ("def largest_scale(gradients):\n    return 65504 / gradients.abs().max()", "power of two"),
        (
            "def largest_scale(gradients):\n"
            "    return 2.0 ** math.floor(math.log2(65504 / gradients.max()))",
            "The largest magnitude decides, whatever its sign",
        ),
        ("def largest_scale(gradients):\n    return 2.0**-2", "but twice this scale also fits"),
    ],
}
