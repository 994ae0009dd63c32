"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_lost_steps": [
        ("lost_steps = 4", "still above 3000"),
        ("lost_steps = 6", "With the last scale, the gradients fit, so this step is not"),
        ("lost_steps = 22", "halves the scale"),
    ],
    "check_casts": [
        ("casts_in_forward = 9", "would be right if autocast cast the input of every layer"),
        ("casts_in_forward = 6", "one is missing"),
        ("casts_in_forward = 4", "the biases"),
        ("casts_in_forward = 8", "List the tensors that each layer uses, and leave out the fp16"),
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
            "the input of the model has the dtype",
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
            "the backward pass runs inside the autocast block",
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
            "Run the forward pass under autocast with this dtype",
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
            "Call `scaler.step`, so that the scaler skips this step",
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
            "the weights are wrong after the second step",
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
            "Do you scale the loss, and do you call `scaler.step`?",
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
        (
            "def verdict(first, second):\n    return 'cannot tell'",
            "These intervals do not overlap, so you can tell which speed-up",
        ),
    ],
}
