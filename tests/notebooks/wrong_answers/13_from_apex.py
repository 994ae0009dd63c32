"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_momentum_bytes": [
        (
            "o2_bytes, autocast_bytes = 20, 16",
            "SGD with momentum stores only one value for each parameter",
        ),
        ("o2_bytes, autocast_bytes = 12, 12", "The optimizer updates the master weights, so these"),
        (
            "o2_bytes, autocast_bytes = 16, 10",
            "The parameters, the gradients and the momentum are fp32",
        ),
        ("o2_bytes, autocast_bytes = 8, 12", "a weight and a gradient in fp16"),
    ],
    "check_moved_scaler": [
        ("moved_scaler = torch.amp.GradScaler(1024.0, growth_interval=500)", "the first argument"),
        (
            "moved_scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)",
            "it grows after 2000 good steps",
        ),
        (
            "moved_scaler = torch.amp.GradScaler(device.type, 2.0**9)",
            "The scale is 512 instead of 1024",
        ),
        ("moved_scaler = torch.autocast(device.type)", "object of type autocast"),
    ],
    "check_limits": [
        ("def update_within(scaler, lowest, highest):\n    scaler.update()", "rose to 2^26"),
        (
            "def update_within(scaler, lowest, highest):\n"
            "    scaler.update(min(max(scaler.get_scale(), lowest), highest))",
            "After a good step, the scale should rise from 2^23 to 2^24",
        ),
        (
            """
def update_within(scaler, lowest, highest):
    scaler.update()
    if scaler.get_scale() > highest:
        scaler.update(highest)
""",
            "After overflows, the scale fell to 2^",
        ),
    ],
    "check_two_optimizers": [
        (
            """
def step_of_both(losses, optimizers, scaler):
    for loss, optimizer in zip(losses, optimizers):
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            "the scale is 4096",
        ),
        (
            """
def step_of_both(losses, optimizers, scaler):
    for loss in losses:
        scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
""",
            "divided by the wrong scale",
        ),
        (
            """
def step_of_both(losses, optimizers, scaler):
    for loss, optimizer in zip(losses, optimizers):
        scaler.scale(loss).backward()
        optimizer.step()
""",
            "The weights moved much too far, because an optimizer used",
        ),
        (
            """
def step_of_both(losses, optimizers, scaler):
    scaler.scale(losses[0]).backward()
    scaler.step(optimizers[0])
    scaler.update()
""",
            "second optimizer",
        ),
    ],
}
