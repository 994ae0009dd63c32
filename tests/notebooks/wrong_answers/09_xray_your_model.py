"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_number_of_casts": [
        ("number_of_casts = 4", "travel through the network"),
        ("number_of_casts = 5", "too few"),
        ("number_of_casts = 8", "too many"),
    ],
    "check_casts_up": [
        (
            """
def casts_up(rows):
    return sum(name == "_to_copy" for name, _, _ in rows)
""",
            "those that go down",
        ),
        (
            """
def casts_up(rows):
    return sum("fp32" not in before and after == ("fp32",) for _, before, after in rows)
""",
            "no cast",
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
            "too late",
        ),
        (
            """
def precise_loss(logits, target):
    return F.nll_loss(logits.float(), target)
""",
            "something else",
        ),
    ],
    "check_gigabytes": [
        ("gigabytes = 48", "AdamW"),
        ("gigabytes = 30", "stay fp32"),
        ("gigabytes = 24", "stay fp32"),
        ("gigabytes = 12", "is not it"),
    ],
}
