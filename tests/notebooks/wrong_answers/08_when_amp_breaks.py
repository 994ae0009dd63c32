"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_largest_value": [
        ("largest_value = 255", "fp16 rounds the squares and their sum, and its largest number"),
        ("largest_value = 181", "fp16 rounds the squares and their sum, and its largest number"),
        ("largest_value = 128", "does not overflow either"),
    ],
    "check_diagnosis": [
        ('codes = ("AMP0003", "AMP0015", "AMP0007")', "should change in each step"),
        ('codes = ("AMP0026", "AMP0016", "AMP0007")', "multiplies the gradients"),
        ('codes = ("AMP0026", "AMP0015", "AMP0001")', "used in evaluation"),
    ],
    "check_masked": [
        (
            """
def mask_scores(scores, mask):
    return scores.masked_fill(mask, -torch.inf)
""",
            "minus infinity",
        ),
        (
            """
def mask_scores(scores, mask):
    return scores.masked_fill(mask, -1e9)
""",
            "without overflow",
        ),
        (
            """
def mask_scores(scores, mask):
    return scores * ~mask
""",
            "still gets",
        ),
    ],
    "check_advance": [
        (
            """
def advance(scaler, scheduler):
    scaler.update()
    scheduler.step()
""",
            "in every step",
        ),
        (
            """
def advance(scaler, scheduler):
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() > before:
        scheduler.step()
""",
            "You called `scheduler.step` only if the scale rose",
        ),
        (
            """
def advance(scaler, scheduler):
    scheduler.step()
""",
            "Call `scaler.update()` once in your function",
        ),
    ],
}
