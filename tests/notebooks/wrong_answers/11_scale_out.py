"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_megabytes": [
        ("megabytes = 350", "Autocast casts the inputs"),
        ("megabytes = 400", "is the size of the gradients"),
        ("megabytes = 800", "MB is twice the size of the gradients"),
    ],
    "check_per_rank": [
        ("gigabytes_per_rank = 112", "FSDP2 divides it by the number of ranks"),
        ("gigabytes_per_rank = 7", "The shards stay fp32"),
        ("gigabytes_per_rank = 12.25", "The shards stay fp32"),
    ],
    "check_one_step": [
        (
            """
def one_step(loss, model, optimizer, scaler, average):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    average(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
            "Average the gradients before the scaler checks",
        ),
        (
            """
def one_step(loss, model, optimizer, scaler, average):
    scaler.scale(loss).backward()
    average(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
            "Unscale the gradients, clip them",
        ),
        (
            """
def one_step(loss, model, optimizer, scaler, average):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
            "Do you average the gradients",
        ),
    ],
    "check_loss_of_all": [
        (
            """
def loss_of_all(mean_losses, samples):
    return sum(mean_losses) / len(mean_losses)
""",
            "the mean of the means",
        ),
        (
            """
def loss_of_all(mean_losses, samples):
    return sum(mean_losses) / sum(samples)
""",
            "all nine losses",
        ),
    ],
}
