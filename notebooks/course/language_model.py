"""The model, the text, the training loop and the sampling of notebook 17."""

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from amp_lab.models.gpt import Gpt, Size

LENGTH = 64  # tokens that the model sees at once
_SCALE = 2.0**10  # of fp16: small enough that no step is skipped


def new_model(vocabulary: int) -> Gpt:
    """A small GPT. Its initial weights are larger than usual: it learns more in few steps."""
    model = Gpt(Size(width=64, heads=4, depth=2), vocabulary)
    nn.init.normal_(model.token.weight, std=64**-0.5)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return model


def split(text: str, characters: list[str]) -> tuple[Tensor, Tensor]:
    """The numbers of a text's characters (N,): its first nine tenths, and the last tenth.

    A character that is not in `characters` is left out.
    """
    known = [characters.index(character) for character in text if character in characters]
    tokens = torch.tensor(known)
    end = len(tokens) * 9 // 10
    return tokens[:end], tokens[end:]


def draw(data: Tensor, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Random passages (count, LENGTH) of a text, and the token that follows each token."""
    places = torch.randint(len(data) - LENGTH, (count,), generator=generator).tolist()
    passages = torch.stack([data[place : place + LENGTH + 1] for place in places])
    return passages[:, :-1], passages[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (B, T, vocabulary), computed in fp32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def autocast(model: nn.Module, precision: torch.dtype) -> torch.autocast:
    """Autocast to a precision on the model's device; it is off for fp32."""
    device = _device_of(model)
    is_lower = precision != torch.float32
    return torch.autocast(device.type, dtype=precision, enabled=is_lower)


def train(
    model: nn.Module,
    precision: torch.dtype,
    data: Tensor,
    *,
    seed: int,
    steps: int,
    batch: int,
    lr: float = 2e-3,
) -> None:
    """Train a model in place, as in notebook 04: autocast, and for fp16 a loss scale."""
    device = _device_of(model)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=lr)
    needs_scale = precision == torch.float16
    scaler = torch.amp.GradScaler(
        device.type, _SCALE, growth_interval=steps + 1, enabled=needs_scale
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs, targets = draw(data, batch, generator)
        inputs = inputs.to(device)
        targets = targets.to(device)
        with autocast(model, precision):
            loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() in (1, _SCALE), "a step was skipped"  # 1 without a scaler


def loss_on(model: nn.Module, data: Tensor, precision: torch.dtype = torch.float32) -> float:
    """The mean loss over 64 passages of a text, in nats per character."""
    device = _device_of(model)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = draw(data, 64, generator)
    inputs = inputs.to(device)
    targets = targets.to(device)
    with torch.no_grad(), autocast(model, precision):
        loss = loss_of(model(inputs), targets)
    return loss.item()


@torch.no_grad()
def continue_text(
    model: nn.Module, prompts: Tensor, precision: torch.dtype, count: int = 120
) -> tuple[Tensor, Tensor]:
    """Continue prompts (B, T), always with the likeliest character.

    Returns the new characters (B, count), and the gap between the two best logits at each of them.
    """
    tokens = prompts
    gaps = []
    for _ in range(count):
        seen = tokens[:, -LENGTH:]
        with autocast(model, precision):
            logits = model(seen)[:, -1]
        best = logits.float().topk(2)
        first, second = best.values.unbind(dim=1)
        gaps.append(first - second)
        likeliest = best.indices[:, :1]
        tokens = torch.cat([tokens, likeliest], dim=1)
    new = tokens[:, -count:]
    return new.cpu(), torch.stack(gaps, dim=1).cpu()


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
