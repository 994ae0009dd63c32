"""Hold what `advise` recommends against every candidate measured at length.

    python tools/measure/advise.py --out FILE

For each model `advise` takes its `--minutes`. Then all that it may recommend, also what it had left
out for want of time, is timed in turns: each sound precision, as it is and in channels-last where
there are convolutions, each of them eager and compiled, in training with fused AdamW besides. What
learns, or answers, otherwise than fp32 is no candidate; `advise` itself and its tests judge that.
"within" says whether the recommended one is surely not more than 5 % slower than the fastest, and
"cannot tell" stands where the interval leaves that open. A host may move a virtual machine's cores,
which turns the ranking of some networks round; "the cores were moved" stands where an exchange
between threads shows that advice and proof had different machines.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torchvision
from torch import nn

from amp_lab.advisor import Advice, Candidate, advise
from amp_lab.core.device import pick_device
from amp_lab.core.estimates import Ratio
from amp_lab.core.timing import compare, measure
from amp_lab.model_call import ModelCall
from amp_lab.models.gpt import Gpt, Size
from amp_lab.recipes import INFERENCE, TRAINING, Recipe, Step, loss_of
from recording import parser, plain, record

ENOUGH = 1.05  # of the time of the fastest
MOVED = 3.0  # between the times of two exchanges: the cores lay elsewhere
UNSOUND = ("unlike fp32", "raises", "does not fit", "emulated")
Inputs = tuple[torch.Tensor, ...]


class LastOfLstm(nn.Module):
    """A sequence (B, T, 64) to 10 classes."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        outputs, _ = self.lstm(x)
        return self.head(outputs[:, -1])


def convolutions(*widths: int) -> nn.Module:
    """A plain network of 3 x 3 convolutions with batch norm, and a linear head."""
    layers: list[nn.Module] = []
    channels = 3
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*layers)


def autoencoder() -> nn.Module:
    """Down to a quarter of the size and up again."""
    down = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()]
    up = [nn.ConvTranspose2d(64, 32, 2, 2), nn.ReLU(), nn.ConvTranspose2d(32, 3, 2, 2)]
    return nn.Sequential(*down, *up)


def perceptron(width: int) -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def transformer() -> nn.Module:
    """Two of torch's own encoder layers, without dropout."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def vision_transformer() -> nn.Module:
    """torchvision's, small."""
    return torchvision.models.VisionTransformer(
        image_size=64, patch_size=8, num_layers=4, num_heads=4, hidden_dim=192, mlp_dim=768
    )


def gpt() -> nn.Module:
    """A small one, for 1,000 tokens."""
    return Gpt(Size(256, heads=4, depth=4), 1000)


def images(batch: int, size: int) -> Inputs:
    """Random images (B, 3, size, size)."""
    return values(batch, 3, size, size)


def values(*shape: int) -> Inputs:
    """One tensor of random numbers."""
    return (torch.randn(shape),)


def tokens(batch: int, length: int) -> Inputs:
    """Random passages (B, T) for `gpt`."""
    return (torch.randint(1000, (batch, length)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "resnet18": (torchvision.models.resnet18, lambda: images(8, 64)),
    "gpt": (gpt, lambda: tokens(4, 128)),
    "convolutions": (lambda: convolutions(32, 64, 64), lambda: images(16, 32)),
    "mobilenet_v3_small": (torchvision.models.mobilenet_v3_small, lambda: images(8, 64)),
    "vision transformer": (vision_transformer, lambda: images(8, 64)),
    "wide perceptron": (lambda: perceptron(1024), lambda: values(128, 1024)),
    "narrow perceptron": (lambda: perceptron(64), lambda: values(32, 64)),
    "lstm": (LastOfLstm, lambda: values(16, 32, 64)),
    "encoder": (transformer, lambda: values(8, 64, 256)),
    "autoencoder": (autoencoder, lambda: images(16, 64)),
    "squeezenet1_1": (torchvision.models.squeezenet1_1, lambda: images(8, 64)),
    "shufflenet_v2_x0_5": (torchvision.models.shufflenet_v2_x0_5, lambda: images(16, 64)),
}


def exchange_ms(device: torch.device) -> float:
    """Time for threads to read a MiB that others wrote: it tells whether they share a cache."""
    numbers = torch.ones(2**18, device=device)

    def exchange() -> None:
        nonlocal numbers
        numbers = numbers.flip(0)

    return 1e3 * measure(exchange, device=device, warmup=200, repeats=200).median_s


def all_recipes(use: str, advice: Advice, recommended: Recipe, has_images: bool) -> list[Recipe]:
    """What might have been recommended: whatever is sound, with all that can be switched on."""
    layouts = (False, True) if has_images else (False,)
    recipes = {recommended}
    for candidate in advice.candidates:
        recipe = candidate.recipe
        precision_alone = Recipe(use, recipe.precision, recipe.cast)
        if recipe != precision_alone:
            continue
        if candidate.verdict in UNSOUND or candidate.time_s is None:
            continue
        for channels_last, compiled in itertools.product(layouts, (False, True)):
            switched_on = replace(
                recipe, channels_last=channels_last, compiled=compiled, fused=use == TRAINING
            )
            recipes.add(switched_on)
    return sorted(recipes, key=str)


def at_length(
    call: ModelCall,
    device: torch.device,
    chosen: Candidate,
    advice: Advice,
    budget_s: float,
    exchanges: list[float],
) -> dict[str, Any]:
    """Time the recommended recipe, `chosen`, in turns with all the others; return a row of figures.

    `exchanges` are the times of `exchange_ms` from before and after `advise` chose it.
    """
    exchanges = [*exchanges, exchange_ms(device)]
    has_images = any(isinstance(module, nn.Conv2d) for module in call.model.modules())
    steps = {}
    for recipe in all_recipes(chosen.recipe.use, advice, chosen.recipe, has_images):
        torch.compiler.reset()
        step = Step(call, recipe, device)
        for _ in range(3):  # compiles
            step()
        steps[str(recipe)] = step
    comparison = compare(steps, device=device, budget_s=budget_s, warmup=1)
    fastest = min(steps, key=comparison.median_s)
    ratio = comparison.ratio(chosen.name, fastest)
    exchanges.append(exchange_ms(device))
    return {
        "recommended": chosen.name,
        "fastest": fastest,
        "times as long as the fastest": plain(ratio),
        "within": is_within(ratio, exchanges),
        "exchange_ms": exchanges,
        "trusted": comparison.trusted,
        "seconds": {name: comparison.median_s(name) for name in steps},
    }


def is_within(ratio: Ratio, exchanges: list[float]) -> str:
    """Whether the recommended one is about as fast as the fastest, as far as that can be told."""
    if max(exchanges) > MOVED * min(exchanges):
        return "the cores were moved"
    low, high = ratio.interval
    if high <= ENOUGH:
        return "yes"
    if low > ENOUGH:
        return "no"
    return "cannot tell"


def proof(minutes: float, budget_s: float, names: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each model: what `advise` says, and long measurements of what it recommends.

    `exchanges` are times of an exchange between threads, which show whether the host has moved the
    cores since `advise` ran.
    """
    device = pick_device()
    for name in names:
        torch.manual_seed(0)
        build, batch = MODELS[name]
        model = build()
        inputs = batch()
        exchanges = [exchange_ms(device)]
        advice = advise(model, *inputs, device=device, minutes=minutes)
        exchanges.append(exchange_ms(device))
        row: dict[str, Any] = {
            "model": name,
            "inputs": [list(tensor.shape) for tensor in inputs],
            "advice": verdicts(advice),
        }
        for use in (TRAINING, INFERENCE):
            if use not in advice.chosen:
                row[use] = "nothing recommended"
                continue
            loss = loss_of(model(*inputs))
            call = ModelCall(model, inputs, loss_fn=loss)
            row[use] = at_length(call, device, advice.chosen[use], advice, budget_s, exchanges)
        yield row


def verdicts(advice: Advice) -> dict[str, str]:
    """What `advise` says about each candidate, in a line each."""
    lines = {}
    for candidate in advice.candidates:
        detail = candidate.speedup or candidate.reason
        text = f"{candidate.verdict} {detail}"
        lines[f"{candidate.recipe.use}: {candidate.name}"] = text.strip()
    return lines


def main() -> None:
    """Measure, print each row, and write them all as JSON."""
    options_parser = parser(__doc__ or "", ["proof"], budget_s=40)
    options_parser.add_argument(
        "--minutes", type=float, default=2.0, help="for advise (default: 2)"
    )
    options_parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    options = options_parser.parse_args()
    names = options.model or list(MODELS)
    measure = functools.partial(proof, options.minutes, options.budget, names)
    record({"proof": measure}, options, pick_device(), minutes=options.minutes)


if __name__ == "__main__":
    main()
