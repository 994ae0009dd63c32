"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_number_of_casts": [
        ("number_of_casts = 4", "is the number of weights and biases in the linear layers"),
        ("number_of_casts = 5", "is too small"),
        ("number_of_casts = 8", "is too large"),
    ],
    "check_casts_up": [
        (
            """
def casts_up(rows):
    return sum(name == "_to_copy" for name, _, _ in rows)
""",
            "This counts all copies, also casts from fp32 and copies",
        ),
        (
            """
def casts_up(rows):
    return sum("fp32" not in before and after == ("fp32",) for _, before, after in rows)
""",
            "You may have counted a sum of fp16 numbers that returns fp32",
        ),
        (
            """
def casts_up(rows):
    return sum(row == ("_to_copy", ("fp16",), ("fp32",)) for row in rows)
""",
            "bf16 to fp32",
        ),
    ],
    "check_precise_loss": [
        (
            """
def precise_loss(logits, target):
    return F.cross_entropy(logits, target).float()
""",
            "the numbers were rounded before the result",
        ),
        (
            """
def precise_loss(logits, target):
    return F.nll_loss(logits.float(), target)
""",
            "For fp32 logits, your function does not return their cross-entropy",
        ),
    ],
    "check_gigabytes": [
        ("gigabytes = 48", "AdamW"),
        ("gigabytes = 30", "stay fp32"),
        ("gigabytes = 24", "stay fp32"),
        ("gigabytes = 12", "Add the bytes of weight, gradient and momentum"),
    ],
}
