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
        ("needed_difference = 0.025", "The question asks for percentage points"),
        ("needed_difference = 2", "You counted only the two standard errors"),
        ("needed_difference = 1.5", "You added one standard error, but the yardstick uses two"),
        ("needed_difference = 20", "Compute the standard error of 90 % accuracy on 900 images"),
    ],
    "check_speedups": [
        ("speedups = 1.0", "two numbers"),
        ("speedups = ((2 + 0.5 + 1) / 3, 1.33)", "mean of three speed-ups"),
        (
            "speedups = (100 / (30 + 15 + 10), 100 / 70)",
            "the depthwise layers became faster",
        ),
        (
            "speedups = (100 / (30 + 60), 100 / 70)",
            "Add up the milliseconds of the three parts, and divide 100 ms",
        ),
        (
            "speedups = (1.0, 100 / (30 + 10))",
            "The depthwise layers take 30 ms again, and the pointwise",
        ),
    ],
    "check_mended_loop": [
        (_LOOP.format(step="scaler.step(optimizer); scaler.update()"), "3 good steps in a row"),
        (_LOOP.format(step="optimizer.step()"), "The weights are inf or NaN"),
        (
            _LOOP.format(step="scaler.unscale_(optimizer); optimizer.step(); scaler.update()"),
            "The weights are inf or NaN",
        ),
    ],
    "check_superfluous": [
        ("superfluous = {'scaler'}", "and 1 more"),
        ("superfluous = {'scaler', 'random', 'scheduler'}", "Without 'scheduler'"),
        ("superfluous = {'weights'}", "use the names from the exercise"),
    ],
}
