"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_needs_scaler": [
        (
            "def needs_scaler(dtype):\n    return True",
            "Does this dtype lose gradients that fp32 keeps?",
        ),
        (
            "def needs_scaler(dtype):\n    return dtype is torch.bfloat16",
            "For torch.float16, you answered False",
        ),
    ],
    "check_marked_lines": [
        (
            """
def amp_step(model, optimizer, scaler, images, labels):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.detach()
""",
            "inside the autocast block",
        ),
        (
            """
def amp_step(model, optimizer, scaler, images, labels):
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    optimizer.step()
    return loss.detach()
""",
            "multiplied by the scale",
        ),
        (
            """
def amp_step(model, optimizer, scaler, images, labels):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()
""",
            "zero_grad",
        ),
        (
            """
def amp_step(model, optimizer, scaler, images, labels):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()
""",
            "did not run under autocast",
        ),
    ],
}
