"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

RIGHT = {
    "train a ResNet on a T4": "fp16 with a scaler",
    "train a GPT on an A100": "bf16 under autocast",
    "serve a BERT, trained in fp32, on a V100": "fp16",
    "serve a language model on an RTX 4090": "bf16",
    "train a U-Net on a GTX 1660": "fp32",
    "solve an ill-conditioned system on an H100": "fp32 with TF32 off",
    "fine-tune on an Arc A770": "bf16 under autocast",
    "train on an MI250X": "bf16 under autocast",
    "serve on a CPU with AMX": "bf16",
    "train on a laptop's CPU with AVX2 alone": "fp32",
}
OUTPUTS = {
    'accelerate, mixed_precision="bf16"': "bf16",
    'Lightning\'s Trainer, precision="bf16-mixed", in training_step': "bf16",
    'Fabric, precision="bf16-true"': "fp32",
    "torch.autocast, after a last linear layer": "bf16",
}

WRONG_ANSWERS = {
    "check_cases": [
        (
            f"answers = {RIGHT | {'fine-tune on an Arc A770': 'fp16 with a scaler'}}",
            "a scaler needs float64, which this GPU does not",
        ),
        (f"answers = {RIGHT | {'train a GPT on an A100': 'tf32'}}", "is not one of fp32"),
        ("answers = {}", "Keep the lines of the exercise, and write an answer into"),
    ],
    "check_bits": [
        (
            "def bits_left(product):\n"
            "    one = torch.ones(1, 1)\n"
            "    return sum(bool(product(one + 2.0**-k, one) > 1) for k in range(1, 30))",
            "The leading 1 is also a bit of the significand",
        ),
        ("def bits_left(product):\n    return 11", "A matmul in bf16 keeps 8 bits"),
    ],
    "check_outputs": [
        (f"outputs = {OUTPUTS}", "This one is wrong: accelerate"),
        ("outputs = {}", "Keep the lines"),
    ],
    "check_scale_down": [
        ("def scale_down(model, x):\n    pass", "It must return at most 1024"),
        (
            "def scale_down(model, x):\n"
            "    with torch.no_grad():\n"
            "        model[0].weight /= 8192\n"
            "        model[2].weight *= 8192",
            "It must return at most 1024",
        ),
        (
            "def scale_down(model, x):\n"
            "    with torch.no_grad():\n"
            "        model[0].weight /= 256\n"
            "        model[0].bias /= 256\n"
            "        model[2].weight *= 256\n"
            "        model[2].bias *= 256",
            "The outputs changed",
        ),
        (
            "def scale_down(model, x):\n"
            "    with torch.no_grad():\n"
            "        factor = model[0](x).abs().max() / 1000\n"
            "        model[0].weight /= factor\n"
            "        model[0].bias /= factor\n"
            "        model[2].weight *= factor",
            "With a power of two, they are exactly the same",
        ),
        (
            "def scale_down(model, x):\n"
            "    with torch.no_grad():\n"
            "        model[0].weight /= 2**20\n"
            "        model[0].bias /= 2**20\n"
            "        model[2].weight *= 2**20",
            "You divided by more than necessary",
        ),
    ],
}
