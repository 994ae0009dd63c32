"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_smallest_scale": [
        ("smallest_scale = 2", "still rounds to 0"),
        ("smallest_scale = 65536", "go lower"),
        ("smallest_scale = 3", "a power of two"),
    ],
    "check_scale_after": [
        ("scale_at_the_end = 1024", "Count the good steps"),
        ("scale_at_the_end = 256", "the counter of good steps"),
    ],
    "check_clipped_step": [
        (
            """
def clipped_step(loss, model, optimizer, scaler):
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
            "still multiplied by the scale",
        ),
        (
            """
def clipped_step(loss, model, optimizer, scaler):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.update()
""",
            "clip before the optimizer takes its step",
        ),
        (
            """
def clipped_step(loss, model, optimizer, scaler):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
""",
            "has not counted a good step",
        ),
        (
            """
def clipped_step(loss, model, optimizer, scaler):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
            "was not used at all",
        ),
    ],
    "check_resumed": [
        ("def resumed_scaler(state):\n    return torch.amp.GradScaler('cpu')", "had come to 512"),
        (
            "def resumed_scaler(state):\n"
            "    return torch.amp.GradScaler('cpu', init_scale=state['scale'])",
            "growth interval is lost",
        ),
        (
            "def resumed_scaler(state):\n    return torch.amp.GradScaler('cpu', enabled=False)",
            "is disabled",
        ),
    ],
}
