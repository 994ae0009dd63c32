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
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torchvision
from torch import nn

from amp_lab.advisor import Advice, Candidate, advise
from amp_lab.core.device import pick_device
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
        self.lstm, self.head = nn.LSTM(64, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return self.head(self.lstm(x)[0][:, -1])


def convolutions(*widths: int) -> nn.Module:
    """A plain network of 3 x 3 convolutions with batch norm, and a linear head."""
    layers: list[nn.Module] = []
    for before, after in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


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


def images(batch: int, size: int) -> Inputs:
    """Random images (B, 3, size, size)."""
    return (torch.randn(batch, 3, size, size),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "resnet18": (torchvision.models.resnet18, lambda: images(8, 64)),
    "gpt": (
        lambda: Gpt(Size(256, heads=4, depth=4), 1000),
        lambda: (torch.randint(1000, (4, 128)),),
    ),
    "convolutions": (lambda: convolutions(32, 64, 64), lambda: images(16, 32)),
    "mobilenet_v3_small": (torchvision.models.mobilenet_v3_small, lambda: images(8, 64)),
    "vision transformer": (vision_transformer, lambda: images(8, 64)),
    "wide perceptron": (lambda: perceptron(1024), lambda: (torch.randn(128, 1024),)),
    "narrow perceptron": (lambda: perceptron(64), lambda: (torch.randn(32, 64),)),
    "lstm": (LastOfLstm, lambda: (torch.randn(16, 32, 64),)),
    "encoder": (transformer, lambda: (torch.randn(8, 64, 256),)),
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
    seen = [c for c in advice.candidates if c.recipe.use == use]
    plain_ones = [c for c in seen if c.recipe == Recipe(use, c.recipe.precision, c.recipe.cast)]
    found = {recommended}
    for candidate in plain_ones:
        if candidate.verdict in UNSOUND or candidate.time_s is None:
            continue
        for channels_last in (False, True) if has_images else (False,):
            for compiled in (False, True):
                recipe = replace(candidate.recipe, channels_last=channels_last, compiled=compiled)
                found.add(replace(recipe, fused=use == TRAINING))
    return sorted(found, key=str)


def at_length(
    call: ModelCall,
    device: torch.device,
    chosen: Candidate,
    advice: Advice,
    budget_s: float,
    exchanges: list[float],
) -> dict[str, Any]:
    """The recommended recipe in turns with all the others; `exchanges` is of when it was chosen."""
    exchanges = [*exchanges, exchange_ms(device)]
    has_images = any(isinstance(module, nn.Conv2d) for module in call.model.modules())
    use, found = chosen.recipe.use, {}
    for recipe in all_recipes(use, advice, chosen.recipe, has_images):
        torch.compiler.reset()
        step = Step(call, recipe, device)
        for _ in range(3):  # compiles
            step()
        found[str(recipe)] = step
    timed = compare(found, device=device, budget_s=budget_s, warmup=1)
    fastest = min(found, key=timed.median_s)
    ratio = timed.ratio(chosen.name, fastest)
    low, high = ratio.interval
    within = "yes" if high <= ENOUGH else "no" if low > ENOUGH else "cannot tell"
    exchanges.append(exchange_ms(device))
    if max(exchanges) > MOVED * min(exchanges):
        within = "the cores were moved"
    return {
        "recommended": chosen.name,
        "fastest": fastest,
        "times as long as the fastest": plain(ratio),
        "within": within,
        "exchange_ms": exchanges,
        "trusted": timed.trusted,
        "seconds": {name: timed.median_s(name) for name in found},
    }


def proof(minutes: float, budget_s: float, names: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each model."""
    device = pick_device()
    for name in names:
        torch.manual_seed(0)
        build, batch = MODELS[name]
        model, inputs = build(), batch()
        exchanges = [exchange_ms(device)]
        advice = advise(model, *inputs, device=device, minutes=minutes)
        exchanges.append(exchange_ms(device))
        row: dict[str, Any] = {"model": name, "inputs": [list(x.shape) for x in inputs]}
        row["advice"] = {
            f"{c.recipe.use}: {c.name}": f"{c.verdict} {c.speedup or c.reason}".strip()
            for c in advice.candidates
        }
        for use in (TRAINING, INFERENCE):
            if use not in advice.chosen:
                row[use] = "nothing recommended"
                continue
            call = ModelCall(model, inputs)
            loss = loss_of(model(*inputs))
            call = replace(call, loss_fn=loss)
            row[use] = at_length(call, device, advice.chosen[use], advice, budget_s, exchanges)
        yield row


def main() -> None:
    """Measure, print each row, and write them all as JSON."""
    options_of = parser(__doc__ or "", ["proof"], budget_s=40)
    options_of.add_argument("--minutes", type=float, default=2.0, help="for advise (default: 2)")
    options_of.add_argument("--model", choices=MODELS, action="append", help="default: all")
    options = options_of.parse_args()
    names = options.model or list(MODELS)
    measure = functools.partial(proof, options.minutes, options.budget, names)
    record({"proof": measure}, options, pick_device(), minutes=options.minutes)


if __name__ == "__main__":
    main()
