"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_map_size": [
        ("map_mib = 392", "size in fp32"),
        ("map_mib = 98", "Each of them has two bytes"),
        ("map_mib = 0.77", "Multiply images, channels, height, width and bytes, and divide"),
    ],
    "check_largest_batch": [
        ("largest = 1274", "is not a positive multiple of 32"),
        ("largest = 1440", "This fits into the GPU, but leaves less than 1 GiB free"),
        ("largest = 1472", "This is more than the memory of the GPU"),
        ("largest = 1216", "so 32 more images also fit"),
    ],
    "check_head_mode": [
        (
            "def head_mode(model):\n    model.requires_grad_(False)\n    return model.train()",
            "running average",
        ),
        ("def head_mode(model):\n    return model.eval()", "head is not in training mode"),
        ("def head_mode(model):\n    model.eval()", "Return the model"),
    ],
    "check_halved": [
        ("halved = {'activations', 'weights'}", "the weights took"),
        ("halved = {'activations', 'gradients'}", "the gradients took"),
        ("halved = set()", "You left out something that an op under autocast returns"),
        ("halved = {'maps'}", "use the names from the exercise"),
    ],
}
