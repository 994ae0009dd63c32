"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_logits": [
        ("gibibytes = 4 * 4096 * 151_936 * 6 / 1e9", "right in GB"),
        ("gibibytes = 4 * 4096 * 151_936 * 2 / 2**30", "bf16 alone"),
        ("gibibytes = 4 * 4096 * 151_936 * 4 / 2**30", "fp32 copy alone"),
        ("gibibytes = 100", "Count six bytes for each value"),
    ],
    "check_agreement": [
        (
            "def attend(q, k, v):\n"
            "    return F.scaled_dot_product_attention(q, k, v.float()).to(v.dtype)",
            "Cast q and k to the dtype of v, instead of v to fp32",
        ),
        (
            "def attend(q, k, v):\n    return F.scaled_dot_product_attention(q, k, v.float())",
            "your function returns float32",
        ),
        (
            "def attend(q, k, v):\n    return F.scaled_dot_product_attention(q, k, v)",
            "same dtype",
        ),
    ],
    "check_chunked": [
        (
            "def mean_of_chunks(logits, targets):\n"
            "    parts = zip(logits.chunk(2), targets.chunk(2))\n"
            "    return sum(F.cross_entropy(*part) for part in parts) / 2",
            "the mean of two means",
        ),
        (
            "def mean_of_chunks(logits, targets):\n"
            "    parts = zip(logits.chunk(2), targets.chunk(2))\n"
            "    total = sum(F.cross_entropy(*part, reduction='sum') for part in parts)\n"
            "    return total / len(targets)",
            "Divide by the number of targets that are not -100",
        ),
    ],
    "check_merge": [
        (
            "def merge(weight, up, down, scaling):\n"
            "    return weight + (scaling * (up @ down)).bfloat16()",
            "You rounded the update before you added",
        ),
        (
            "def merge(weight, up, down, scaling):\n    return weight + scaling * (up @ down)",
            "The merged weight must be bf16, like the base weight",
        ),
        (
            "def merge(weight, up, down, scaling):\n"
            "    return (weight.float() + up @ down).bfloat16()",
            "Multiply the update by `scaling`",
        ),
    ],
}
