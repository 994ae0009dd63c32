"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

_LOOP = """
def mended_loop(model, optimizer, epochs):
    for batches_of_epoch in epochs:
        scaler = torch.amp.GradScaler(device.type)
        for images, targets in batches_of_epoch:
            with torch.autocast(device.type, dtype=torch.float16):
                loss = F.cross_entropy(model(images).float(), targets)
            scaler.scale(loss).backward()
            {step}
            optimizer.zero_grad()
    return scaler
"""

WRONG_ANSWERS = {
    "check_needed_difference": [
        ("needed_difference = 0.025", "asks for points"),
        ("needed_difference = 2", "Seeds differ as well"),
        ("needed_difference = 1.5", "allows two"),
        ("needed_difference = 20", "Work out the standard error"),
    ],
    "check_speedups": [
        ("speedups = 1.0", "two numbers"),
        ("speedups = ((2 + 0.5 + 1) / 3, 1.33)", "mean of three speed-ups"),
        ("speedups = (100 / (30 + 15 + 10), 100 / 70)", "not the speed-up of plain"),
        ("speedups = (1.0, 100 / (30 + 10))", "take their 30 ms again"),
    ],
    "check_mended_loop": [
        (_LOOP.format(step="scaler.step(optimizer); scaler.update()"), "3 good steps in a row"),
        (_LOOP.format(step="optimizer.step()"), "no longer finite"),
        (
            _LOOP.format(step="scaler.unscale_(optimizer); optimizer.step(); scaler.update()"),
            "no longer finite",
        ),
    ],
    "check_superfluous": [
        ("superfluous = {'scaler'}", "do without 1 more"),
        ("superfluous = {'scaler', 'random', 'scheduler'}", "Without 'scheduler'"),
        ("superfluous = {'weights'}", "names are those of the task"),
    ],
}
