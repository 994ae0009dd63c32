"""Checks for notebook 14, Weigh ten common practices."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course.exercises import call, exercise, need

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@exercise
def check_lost_steps(lost: int) -> str:
    """The steps that are lost until a scale of 65536 has come down to 3000 or less."""
    scaler = torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    scales = [scaler.get_scale()]
    while scales[-1] > 3000:
        weight.grad = torch.tensor([torch.inf])
        scaler.scale(torch.ones(()))  # makes the scaler begin, as a loss would
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    steps = len(scales) - 1
    need(
        lost != steps + 1,
        f"{lost} is the number of scales. With the last scale, the gradients fit, so this step"
        " is not lost.",
    )
    need(
        lost != steps - 1,
        f"After {lost} lost steps, the scale is 65536 / 2^{lost} = {65536 / 2**lost:g}, which "
        "is still above 3000.",
    )
    need(
        lost == steps,
        f"{lost} is wrong. Each lost step halves the scale, until the gradients fit.",
    )
    return "The scales were " + ", ".join(f"{value:g}" for value in scales) + "."


class _Casts(TorchDispatchMode):
    """Counts the casts that run while it is active."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.count += "_to_copy" in func.name()
        return func(*args, **(kwargs or {}))


@exercise
def check_casts(casts: int) -> str:
    """The casts in the forward pass of three linear layers, with ReLU between them."""
    layers = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)
    with torch.autocast("cpu", dtype=torch.float16), _Casts() as found:
        nn.Sequential(*layers)(torch.ones(4, 8))
    need(
        casts != found.count + 2,
        f"{casts} would be right if autocast cast the input of every layer. Which dtype does a"
        " layer return?",
    )
    need(
        casts != found.count - 1,
        f"With {casts} casts, one is missing. Are all tensors that the first layer uses "
        "already in fp16?",
    )
    need(
        casts != found.count - 3,
        f"With {casts} casts, you left out the biases. They are fp32 parameters too.",
    )
    need(
        casts == found.count,
        f"{casts} is wrong. List the tensors that each layer uses, and leave out the fp16 tensors.",
    )
    return "Autocast casts the weights and biases of all layers, and the input of the first layer."


class _Watched:
    """A small model, and what it has seen of a step."""

    def __init__(self, dtype: torch.dtype):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype is torch.float16)
        self.dtype, self.in_backward = dtype, False
        self.inputs: torch.dtype | None = None
        self.outputs: torch.dtype | None = None
        self.model.register_forward_hook(self._note)

    def _note(self, _: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self.inputs, self.outputs = args[0].dtype, output.dtype
        output.register_hook(self._note_backward)

    def _note_backward(self, _: torch.Tensor) -> None:
        self.in_backward = torch.is_autocast_enabled("cpu")

    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def take(self, step: Callable[..., Any], target: float) -> None:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(8, 4, generator=generator), torch.full((8, 1), target)
        call(step, self.model, x, y, self.optimizer, self.scaler, self.dtype)


def _right_step(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, optimizer: Any, scaler: Any, dtype: Any
) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@exercise
def check_mended_step(step: Callable[..., Any]) -> str:
    """A step that is right in fp16, bf16 and fp32."""
    for dtype, name in _NAMES.items():
        right, found = _Watched(dtype), _Watched(dtype)
        start = found.weights()
        right.take(_right_step, 1.0)
        found.take(step, 1.0)
        need(
            found.inputs in (torch.float32, None),
            f"In {name}, the input of the model has the dtype {found.inputs}. Let autocast "
            "cast it.",
        )
        need(
            found.outputs is dtype,
            f"In {name}, the output of the model has the dtype {found.outputs}. Run the "
            "forward pass under autocast with this dtype.",
        )
        need(
            not found.in_backward,
            f"In {name}, the backward pass runs inside the autocast block. End the block after"
            " the loss.",
        )
        need(
            not torch.equal(start, found.weights()),
            f"In {name}, the weights did not move. Does the optimizer take a step?",
        )
        need(
            torch.allclose(right.weights(), found.weights(), atol=1e-6),
            f"In {name}, the weights are wrong after the first step. Do you scale the loss, "
            "and do you call `scaler.step`?",
        )
        right.take(_right_step, 2.0)
        found.take(step, 2.0)
        need(
            torch.allclose(right.weights(), found.weights(), atol=1e-6),
            f"In {name}, the weights are wrong after the second step. Do you set the gradients"
            " to zero before it?",
        )
    overflowing = _Watched(torch.float16)
    overflowing.take(step, torch.inf)
    need(
        bool(overflowing.weights().isfinite().all()),
        "In fp16, an overflow changes the weights. Call `scaler.step`, so that the scaler "
        "skips this step.",
    )
    need(
        overflowing.scaler.get_scale() == 512,
        "In fp16, an overflow does not halve the scale. Call `update` exactly once.",
    )
    return "The step is right in fp16, bf16 and fp32, and it is skipped after an overflow."


@exercise
def check_verdict(verdict: Callable[..., Any]) -> str:
    """What may be said of a second speed-up compared with a first, from their intervals."""
    apart = (1.0, 1.2), (1.3, 1.5)
    for first, second, right in ((*apart, "more"), (*reversed(apart), "less")):
        answer = call(verdict, first, second)
        need(
            answer == right,
            f"For first = {first} and second = {second}, you returned {answer!r}. These "
            "intervals do not overlap, so you can tell which speed-up is higher. The question"
            " is about the second.",
        )
    overlapping = (1.0, 1.4), (1.3, 1.6)
    nested = (1.0, 1.6), (1.2, 1.3)
    for one, other in (overlapping, nested):
        for first, second in ((one, other), (other, one)):
            answer = call(verdict, first, second)
            need(
                answer == "cannot tell",
                f"For first = {first} and second = {second}, you returned {answer!r}. But the "
                "intervals overlap, so both speed-ups may be the same number.",
            )
    return "If the intervals overlap, you cannot tell which speed-up is higher."
