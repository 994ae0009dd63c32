"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_lost_steps": [
        ("lost_steps = 4", "still above 3000"),
        ("lost_steps = 6", "the last one fits"),
        ("lost_steps = 22", "halves the scale"),
    ],
    "check_casts": [
        ("casts_in_forward = 9", "each layer's input"),
        ("casts_in_forward = 6", "one is missing"),
        ("casts_in_forward = 4", "the biases"),
        ("casts_in_forward = 8", "strike out"),
    ],
    "check_mended_step": [
        (
            """
def mended_step(model, x, y, optimizer, scaler, dtype):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        loss = nn.functional.mse_loss(model(x.half()), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
            "leave casts to autocast",
        ),
        (
            """
def mended_step(model, x, y, optimizer, scaler, dtype):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
            "end the block after the loss",
        ),
        (
            """
def mended_step(model, x, y, optimizer, scaler, dtype):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
            "not in a block",
        ),
        (
            """
def mended_step(model, x, y, optimizer, scaler, dtype):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
""",
            "let the scaler skip",
        ),
        (
            """
def mended_step(model, x, y, optimizer, scaler, dtype):
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
            "the first one's",
        ),
        (
            """
def mended_step(model, x, y, optimizer, scaler, dtype):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    optimizer.step()
""",
            "is the loss scaled",
        ),
    ],
    "check_verdict": [
        (
            "def verdict(first, second):\n"
            "    return 'more' if sum(second) > sum(first) else 'less'",
            "the intervals overlap",
        ),
        (
            "def verdict(first, second):\n    return 'less' if second[0] > first[1] else 'more'",
            "about the second",
        ),
        ("def verdict(first, second):\n    return 'cannot tell'", "do not touch"),
    ],
}
