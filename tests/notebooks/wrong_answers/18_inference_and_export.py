"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_gibibytes": [
        ("gibibytes = 8e9 * (1 + 4 / 4096) / 1e9", "right in GB"),
        ("gibibytes = 8e9 * 2 / 2**30", "That is bf16"),
        ("gibibytes = 8e9 * 5 / 2**30", "A row shares its scale"),
        ("gibibytes = 30", "It is not 30 GiB"),
    ],
    "check_changed": [
        (
            "def changed_share(reference, logits):\n"
            "    return (reference.argmax(1) == logits.argmax(1)).float().mean().item()",
            "stayed the same",
        ),
        (
            "def changed_share(reference, logits):\n"
            "    return (reference.argmax(1) != logits.argmax(1)).sum().item()",
            "That is the count",
        ),
        (
            "def changed_share(reference, logits):\n"
            "    return (reference != logits).float().mean().item()",
            "compare where the largest value stands",
        ),
    ],
    "check_predict": [
        ("def predict(model, images):\n    return model(images).softmax(1)", "cast them first"),
        (
            "def predict(model, images):\n    return model(images.bfloat16()).softmax(1)",
            "users of probabilities want fp32",
        ),
        (
            "def predict(model, images):\n    return model(images.bfloat16()).softmax(1).float()",
            "logits that are fp32 already",
        ),
    ],
    "check_fold": [
        (
            "def fold(convolution, norm):\n"
            "    factor = norm.weight / (norm.running_var + norm.eps).sqrt()\n"
            "    return convolution.weight * factor[:, None, None, None], norm.bias",
            "look at the bias",
        ),
        (
            "def fold(convolution, norm):\n"
            "    factor = norm.weight / norm.running_var.sqrt()\n"
            "    weight = convolution.weight * factor[:, None, None, None]\n"
            "    return weight, norm.bias - norm.running_mean * factor",
            "look at the factor",
        ),
    ],
}
