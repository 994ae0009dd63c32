"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

_GROUP = """
def group_step(losses, model, optimizer, scaler):
    for loss in losses:
        scaler.scale(loss).backward()
"""
_END = "def end_of_step(optimizer, scaler, scheduler):\n    scaler.step(optimizer)\n"

WRONG_ANSWERS = {
    "check_norms": [
        ("norms = (0.5, 0.0003)", "What does `step` do after that"),
        ("norms = (6 / 1024, 0.0003)", "6 times 1024"),
        (
            "norms = (0.5 / 1024, 0.5 / 1024)",
            "The first number is right, but the final norm of the second",
        ),
        ("norms = 0.5", "The answer is two numbers, such as (6.0, 0.0003), but you gave"),
    ],
    "check_group_step": [
        (
            _GROUP + "    clip_grad_norm_(model.parameters(), 0.1)\n"
            "    scaler.step(optimizer)\n    scaler.update()",
            "The gradients were divided by the scale twice, or you clipped",
        ),
        (
            _GROUP + "    scaler.step(optimizer)\n    scaler.update()",
            "Clip the sum of the gradients before the step",
        ),
        (
            _GROUP + "        scaler.unscale_(optimizer)\n"
            "        clip_grad_norm_(model.parameters(), 0.1)\n"
            "    scaler.step(optimizer)\n    scaler.update()",
            "has already been called",
        ),
        (
            _GROUP + "        scaler.unscale_(optimizer)\n"
            "        clip_grad_norm_(model.parameters(), 0.1)\n        scaler.update()\n"
            "    scaler.step(optimizer)\n    scaler.update()",
            "The gradients were divided by the scale twice, or you clipped",
        ),
    ],
    "check_end_of_step": [
        (
            _END + "    scaler.update()\n    before = scaler.get_scale()\n"
            "    if scaler.get_scale() >= before:\n        scheduler.step()",
            "all six steps",
        ),
        (
            _END + "    before = scaler.get_scale()\n    scaler.update()\n"
            "    if scaler.get_scale() == before:\n        scheduler.step()",
            "Without an overflow, you called `scheduler.step` only",
        ),
        (_END + "    scheduler.step()", "since the last update"),
    ],
    "check_after_unscale": [
        ("after_unscale = {'log', 'clamp', 'noise', 'freeze'}", "`freeze` gives the same result"),
        ("after_unscale = {'clamp'}", "2 more"),
        ("after_unscale = 'log'", "The answer is a set of names from"),
    ],
}
