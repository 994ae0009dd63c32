"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_gibibytes": [
        ("gibibytes = 8e9 * (1 + 4 / 4096) / 1e9", "right in GB"),
        ("gibibytes = 8e9 * 2 / 2**30", "This is bf16, with two bytes for each weight"),
        (
            "gibibytes = 8e9 * 5 / 2**30",
            "The weights of a row share one scale, so it adds 4 / 4096",
        ),
        ("gibibytes = 30", "Count one byte for each weight"),
    ],
    "check_changed": [
        (
            "def changed_share(reference, logits):\n"
            "    return (reference.argmax(1) == logits.argmax(1)).float().mean().item()",
            "This is the share of rows that did not change",
        ),
        (
            "def changed_share(reference, logits):\n"
            "    return (reference.argmax(1) != logits.argmax(1)).sum().item()",
            "This is the number of changed rows",
        ),
        (
            "def changed_share(reference, logits):\n"
            "    return (reference != logits).float().mean().item()",
            "Compare the positions of the largest values, not the values",
        ),
    ],
    "check_predict": [
        (
            "def predict(model, images):\n    return model(images).softmax(1)",
            "Cast the images first",
        ),
        (
            "def predict(model, images):\n    return model(images.bfloat16()).softmax(1)",
            "but it should return fp32 probabilities",
        ),
        (
            "def predict(model, images):\n    return model(images.bfloat16()).softmax(1).float()",
            "Cast the logits to fp32",
        ),
    ],
    "check_fold": [
        (
            "def fold(convolution, norm):\n"
            "    factor = norm.weight / (norm.running_var + norm.eps).sqrt()\n"
            "    return convolution.weight * factor[:, None, None, None], norm.bias",
            "Check the bias",
        ),
        (
            "def fold(convolution, norm):\n"
            "    factor = norm.weight / norm.running_var.sqrt()\n"
            "    weight = convolution.weight * factor[:, None, None, None]\n"
            "    return weight, norm.bias - norm.running_mean * factor",
            "Check the factor of each output channel",
        ),
    ],
}
