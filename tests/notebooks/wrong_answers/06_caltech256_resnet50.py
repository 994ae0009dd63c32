"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_map_size": [
        ("map_mib = 392", "size in fp32"),
        ("map_mib = 98", "counted numbers"),
        ("map_mib = 0.77", "multiply images"),
    ],
    "check_largest_batch": [
        ("largest = 1274", "no positive multiple"),
        ("largest = 1440", "was to stay free"),
        ("largest = 1472", "more than the whole GPU"),
        ("largest = 1216", "32 more fit"),
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
        ("halved = set()", "Something is missing"),
        ("halved = {'maps'}", "names are those of the task"),
    ],
}
