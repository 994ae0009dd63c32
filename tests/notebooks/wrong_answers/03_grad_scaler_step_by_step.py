"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_smallest_scale": [
        ("smallest_scale = 2", "still rounds this to 0"),
        ("smallest_scale = 65536", "The gradient does not become 0"),
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
            "Clip to a norm of 1 before the optimizer step",
        ),
        (
            """
def clipped_step(loss, model, optimizer, scaler):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
""",
            "The weights are right, but the scaler did not count a good step",
        ),
        (
            """
def clipped_step(loss, model, optimizer, scaler):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
            "The weights are right, but the scaler did not count a good step",
        ),
    ],
    "check_resumed": [
        (
            "def resumed_scaler(state):\n    return torch.amp.GradScaler('cpu')",
            "but the old scaler had reached 512",
        ),
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
