"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_speedup": [
        ("speedup = 1.4", "not 40 % less time"),
        ("speedup = 0.6", "became slower"),
        ("speedup = 2.5", "would take 40 ms"),
    ],
    "check_seconds_of": [
        (
            """
def seconds_of(step, wait):
    wait()
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
""",
            "It stops before the device has finished",
        ),
        (
            """
def seconds_of(step, wait):
    started = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - started
""",
            "older work",
        ),
    ],
    "check_paired": [
        (
            """
def paired(fp32_losses, bf16_losses):
    spread = (fp32_losses.var() + bf16_losses.var()) / len(fp32_losses)
    return bf16_losses.mean() - fp32_losses.mean(), spread.sqrt()
""",
            "two separate groups",
        ),
        (
            """
def paired(fp32_losses, bf16_losses):
    differences = bf16_losses - fp32_losses
    return differences.mean(), differences.std()
""",
            "is the standard deviation of a single difference",
        ),
        (
            """
def paired(fp32_losses, bf16_losses):
    differences = fp32_losses - bf16_losses
    return differences.mean(), differences.std() / len(differences) ** 0.5
""",
            "the wrong sign",
        ),
    ],
    "check_memory_share": [
        ("memory_share = 0.5", "Half would be right if autocast stored everything in 16 bits"),
        ("memory_share = 0.7", "Write down the four parts in both precisions"),
        ("memory_share = 1800", "between 0 and 1"),
    ],
}
