"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_megabytes": [
        ("megabytes = 350", "Autocast casts the inputs"),
        ("megabytes = 400", "is the size of the gradients"),
        ("megabytes = 800", "keeps its own part"),
    ],
    "check_per_rank": [
        ("gigabytes_per_rank = 112", "DDP holds on every rank"),
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
            "before the average",
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
            "unscaled when they are clipped",
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
            "Was the average formed",
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
