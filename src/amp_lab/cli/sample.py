"""`amp-lab sample`: generate text with a language model that was trained here."""

import argparse
import math
from typing import TYPE_CHECKING

from amp_lab.core.errors import DataError, OptionError

if TYPE_CHECKING:
    import numpy as np

    from amp_lab.train.data.tokens import Tokens


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    sample = commands.add_parser(
        "sample",
        help="generate text with a language model that you trained with amp-lab train",
        description="Generate text with a language model that you trained with amp-lab train.",
    )
    option = sample.add_argument
    option("run_folder", metavar="DIR", help="the folder of the run")
    option("--prompt", metavar="TEXT", help="the text to continue (default: a line break)")
    option("--tokens", metavar="N", type=int, default=300, help="tokens to generate (default: 300)")
    temperature = "sampling temperature; 0 selects the most probable token (default: 0.8)"
    option("--temperature", metavar="X", type=float, default=0.8, help=temperature)
    option("--seed", metavar="N", type=int, default=0, help="random seed (default: 0)")
    option("--precision", metavar="NAME", default="fp32", help="fp32 (default), tf32, fp16, bf16")
    device = "device to use (default: AMP_LAB_DEVICE, else the accelerator, else cpu)"
    option("--device", metavar="NAME", help=device)
    sample.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the prompt and the generated text."""
    import torch

    from amp_lab.core.device import pick_device
    from amp_lab.core.precision import Precision
    from amp_lab.models.gpt import generate
    from amp_lab.train.data.tokens import saved_tokens
    from amp_lab.train.export import load_model

    _check(options)
    device = pick_device(options.device)
    precision = Precision(options.precision)
    model, state, config = load_model(options.run_folder)
    try:
        tokens = saved_tokens(state)
    except DataError as error:
        raise OptionError(f"{options.run_folder}: {error}") from error
    if tokens is None:
        raise OptionError(
            f"{options.run_folder}: this run was trained on images, so it cannot generate text"
        )
    prompt = torch.from_numpy(_encode(options.prompt, tokens)).long().to(device)  # (T,)
    model = model.to(device).eval()
    with precision.autocast(device.type):
        token_ids = generate(
            model,
            prompt,
            options.tokens,
            config.passage_length,
            options.temperature,
            options.seed,
        )
    if token_ids is None:
        outputs = f"the outputs of the model in {precision}"
        raise OptionError(
            f"{options.run_folder}: {outputs} are NaN or infinite, so it cannot generate text"
        )
    print(tokens.decode(token_ids.tolist()))


def _check(options: argparse.Namespace) -> None:
    """Raise `OptionError` for an option out of its range, or an unknown precision."""
    from amp_lab.core.precision import Precision

    if not 1 <= options.tokens <= 10**6:
        raise OptionError(f"--tokens {options.tokens} must be from 1 to 1,000,000")
    if options.temperature < 0 or not math.isfinite(options.temperature):
        raise OptionError(f"--temperature {options.temperature} must be finite, and 0 or more")
    if not 0 <= options.seed < 2**63:
        raise OptionError(f"--seed {options.seed} must be from 0 to 2^63 - 1")
    if options.precision not in list(Precision):
        raise OptionError(
            f"unknown precision {options.precision!r}: use one of {', '.join(Precision)}"
        )


def _encode(prompt: str | None, tokens: "Tokens") -> "np.ndarray":
    """The ids of a prompt's tokens: (T,).

    Without a prompt: the id of a line break, or 0 if the run's tokens have no line break.
    Raises `OptionError` for a prompt without a token.
    """
    import numpy as np

    if prompt is None and not tokens.knows("\n"):
        return np.zeros(1, np.int32)
    text = "\n" if prompt is None else prompt
    token_ids = tokens.encode([text])[0]
    if len(token_ids) == 0:
        raise OptionError(f"--prompt {prompt!r} contains no token of this run: give another prompt")
    return token_ids
