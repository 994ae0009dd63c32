"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

_LAST = "memory_format=torch.channels_last"

WRONG_ANSWERS = {
    "check_layer_flops": [
        ("layer_flops = 2 * 1024 * 64 * 128", "is the number for the forward pass"),
        ("layer_flops = 3 * 1024 * 64 * 128", "an addition are two"),
        ("layer_flops = 4 * 1024 * 64 * 128", "only one matmul in the backward pass"),
        ("layer_flops = 64 * 128", "Multiply pixels, weights, 2, and the number of matmuls"),
    ],
    "check_least_ms": [
        (
            "def least_ms(flops, nbytes, flops_per_s, bytes_per_s):\n"
            "    return 1e3 * (flops / flops_per_s + nbytes / bytes_per_s)",
            "the sum of both",
        ),
        (
            "def least_ms(flops, nbytes, flops_per_s, bytes_per_s):\n"
            "    return max(flops / flops_per_s, nbytes / bytes_per_s)",
            "in seconds",
        ),
        (
            "def least_ms(flops, nbytes, flops_per_s, bytes_per_s):\n"
            "    return 1e3 * flops / flops_per_s",
            "but the other of the two takes longer",
        ),
    ],
    "check_to_channels_last": [
        (
            f"def to_channels_last(model, images):\n    model.to({_LAST})\n"
            f"    images.to({_LAST})\n    return model, images",
            "returns a new tensor",
        ),
        (
            f"def to_channels_last(model, images):\n    model.to({_LAST})\n"
            "    return model, images.permute(0, 2, 3, 1)",
            "Only the order in memory should change",
        ),
        (
            f"def to_channels_last(model, images):\n    return model, images.to({_LAST})",
            "the model's weight",
        ),
    ],
    "check_pays_from": [
        ("pays_from = 16", "reaches below 1"),
        ("pays_from = 128", "a smaller size"),
        ("pays_from = 100", "The answer is one of the sizes"),
    ],
}
