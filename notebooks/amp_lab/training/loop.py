"""One training loop and one evaluation for every precision."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from amp_lab.distributed.ranks import ALONE, Parallel, Ranks
from amp_lab.precision import Precision, require_backend

Batches = Iterable[tuple[Tensor, Tensor]]
"""Inputs (N, …) and targets (N, …) of one pass over the data, batch by batch, on the CPU."""


@dataclass(frozen=True)
class EpochMetrics:
    """What is known of a finished epoch."""

    epoch: int
    """Counted from 1."""
    train_loss: float
    """Mean over the samples, each at the time it was trained on."""
    train_accuracy: float
    """Share of the samples classified right, from 0 to 1, likewise."""
    test_loss: float
    """Mean over the test samples after the epoch; NaN without a test set."""
    test_accuracy: float
    lr: float
    """Learning rate of the last step (of the first parameter group)."""
    loss_scale: float
    """Loss scale after the epoch; 1 where there is no scaler."""
    seconds: float
    """Time of the training alone, from where this process took the epoch up."""
    images_per_s: float
    """Samples trained on since then, by all processes together, divided by `seconds`."""


@dataclass
class Progress:
    """How far a training has come. `fit` goes on from it, and keeps it up to date.

    Where several processes train together, each has its own.
    """

    batch: int = 0
    """Batches done of the current epoch."""
    samples: int = 0
    """Samples in them."""
    loss_sum: Tensor = field(default_factory=lambda: torch.zeros(()))
    """Sum of the loss over those samples; on the device, so that nothing waits for it."""
    correct: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """How many of them were classified right; likewise."""
    lr: float = math.nan
    """Learning rate of the last step."""
    epochs: list[EpochMetrics] = field(default_factory=list)
    """The finished epochs."""

    def state_dict(self) -> dict:
        """As plain values, for a checkpoint."""
        return vars(self) | {
            "loss_sum": self.loss_sum.cpu(),
            "correct": self.correct.cpu(),
            "epochs": [vars(epoch) for epoch in self.epochs],
        }

    @classmethod
    def from_state_dict(cls, state: dict) -> "Progress":
        """What `state_dict` was made from."""
        return cls(**state | {"epochs": [EpochMetrics(**epoch) for epoch in state["epochs"]]})


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (N, C) and classes (N), computed in fp32.

    Under autocast the logits arrive in fp16 or bf16. `F.cross_entropy` would go on in that dtype on
    some backends, and a loss has too few digits there.
    """
    return F.cross_entropy(outputs.float(), targets)


def fit(
    model: nn.Module,
    train_batches: Callable[[int, int], Batches],
    *,
    optimizer: torch.optim.Optimizer,
    precision: Precision | str,
    device: torch.device | str,
    epochs: int,
    test_batches: Callable[[], Batches] | None = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    channels_last: bool = False,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    after_step: Callable[[Progress], bool] = lambda progress: False,
    after_epoch: Callable[[EpochMetrics], None] = lambda metrics: None,
) -> list[EpochMetrics]:
    """Train `model`, which is on `device` already, until `epochs` epochs are done.

    `train_batches(epoch, batch)` gives the batches of an epoch (from 0) from a batch number on, and
    `test_batches()` those to evaluate on after each. `loss_fn(outputs, targets)` is a mean over the
    batch. A step is taken for every `accumulate` batches (fewer at the end of an epoch), weighted
    by their sizes, which is what one large batch would give; its gradients are clipped to
    `clip_norm`. `scheduler` steps with the optimizer. `channels_last` puts the model and each batch
    of images into that memory format.

    Where several processes train together, `ranks` is the group, `model` what its `wrap` returned,
    and the batches are this process's equal share of each.

    Nothing in the loop waits for the device, so long as the optimizer is a fused one: the others
    make `GradScaler.step` read a flag from it.

    To stop at a step, and to save one, there is `after_step`: it is called when the step is done,
    and if it returns true, `fit` returns. What has to be saved with `progress` to go on from there
    bitwise equal are the states of model, optimizer, scaler, scheduler and random generators.

    Returns the metrics of all finished epochs. Raises `DeviceError` if there is no such device.
    """
    precision, device = Precision(precision), torch.device(device)
    require_backend(device.type)
    progress = Progress() if progress is None else progress
    scaler = precision.grad_scaler(device.type) if scaler is None else scaler
    progress.loss_sum = progress.loss_sum.to(device)
    progress.correct = progress.correct.to(device)
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    if ranks.kind is not Parallel.FSDP:  # which keeps weights as rows of numbers, without a format
        model.to(memory_format=memory_format)

    def step(group: list[tuple[Tensor, Tensor]]) -> None:
        """One optimizer step on the gradients of the batches in `group`."""
        samples = sum(len(targets) for _, targets in group)
        for number, (inputs, targets) in enumerate(group, 1):
            inputs = inputs.to(device, non_blocking=True, memory_format=memory_format)
            targets = targets.to(device, non_blocking=True)
            with ranks.gradient_sync(model, wanted=number == len(group)):
                with _autocast(precision, device, ranks):
                    outputs = model(inputs)
                    loss = loss_fn(outputs, targets)
                scaler.scale(loss * (len(targets) / samples)).backward()
            progress.loss_sum += loss.detach() * len(targets)
            progress.correct += (outputs.argmax(1) == targets).sum()
        if clip_norm is not None:
            scaler.unscale_(optimizer)  # or the norm would be that of the scaled gradients
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        progress.batch += len(group)
        progress.samples += samples

    with precision.float32_mode(device.type):
        while len(progress.epochs) < epochs:
            epoch, samples_before = len(progress.epochs), progress.samples
            model.train()
            started = time.perf_counter()
            batches = train_batches(epoch, progress.batch)
            for group in _groups(_bar(batches, f"epoch {epoch + 1}/{epochs}"), accumulate):
                progress.lr = optimizer.param_groups[0]["lr"]
                step(group)
                if scheduler is not None:
                    scheduler.step()
                if after_step(progress):
                    return progress.epochs
            samples = progress.samples * ranks.size
            train_loss = (ranks.total(progress.loss_sum) / samples).item()  # waits for the device
            seconds = time.perf_counter() - started
            test_loss = test_accuracy = math.nan
            if test_batches is not None:
                test_loss, test_accuracy = evaluate(
                    model,
                    test_batches(),
                    precision=precision,
                    device=device,
                    loss_fn=loss_fn,
                    channels_last=channels_last,
                    ranks=ranks,
                )
            metrics = EpochMetrics(
                epoch=epoch + 1,
                train_loss=train_loss,
                train_accuracy=ranks.total(progress.correct).item() / samples,
                test_loss=test_loss,
                test_accuracy=test_accuracy,
                lr=progress.lr,
                loss_scale=scaler.get_scale(),
                seconds=seconds,
                images_per_s=(progress.samples - samples_before) * ranks.size / seconds,
            )
            progress.epochs.append(metrics)
            progress.batch = progress.samples = 0
            progress.loss_sum.zero_()
            progress.correct.zero_()
            after_epoch(metrics)
    return progress.epochs


def evaluate(
    model: nn.Module,
    batches: Batches,
    *,
    precision: Precision | str,
    device: torch.device | str,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    channels_last: bool = False,
    ranks: Ranks = ALONE,
) -> tuple[float, float]:
    """Mean loss and accuracy (0 to 1) of `model` over `batches`, in evaluation mode.

    The arguments are those of `fit`, and the batches of this process may be of another size than
    those of others, so long as there are as many. The model is left in the mode it was in. There is
    no scaler, since there are no gradients.
    """
    precision, device = Precision(precision), torch.device(device)
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    was_training = model.training
    loss_sum = torch.zeros((), device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    samples = 0
    ranks.share_buffers(model)
    model.eval()
    # FSDP2 makes the memory that it gathers weights into once, and trains with it afterwards.
    no_graph = torch.no_grad if ranks.kind is Parallel.FSDP else torch.inference_mode
    with precision.float32_mode(device.type), no_graph():
        for inputs, targets in _bar(batches, "evaluation"):
            inputs = inputs.to(device, non_blocking=True, memory_format=memory_format)
            targets = targets.to(device, non_blocking=True)
            with _autocast(precision, device, ranks):
                outputs = model(inputs)
                loss = loss_fn(outputs, targets)
            loss_sum += loss * len(targets)
            correct += (outputs.argmax(1) == targets).sum()
            samples += len(targets)
    model.train(was_training)
    samples = ranks.total(torch.tensor(samples)).item()
    return ranks.total(loss_sum).item() / samples, ranks.total(correct).item() / samples


def _autocast(precision: Precision, device: torch.device, ranks: Ranks) -> torch.autocast:
    """Autocast for the forward pass; one that does nothing in fp32 and tf32, and under FSDP2."""
    enabled = precision in (Precision.FP16, Precision.BF16) and ranks.kind is not Parallel.FSDP
    return torch.autocast(device.type, dtype=precision.dtype, enabled=enabled)


def _groups(batches: Batches, size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Lists of `size` batches; the last may be shorter."""
    batches = iter(batches)
    while group := list(itertools.islice(batches, size)):
        yield group


def _bar(batches: Batches, title: str) -> tqdm:
    """`batches` with a progress bar on a terminal, and nothing where the output is none."""
    return tqdm(batches, desc=title, unit="batch", leave=False, disable=None)
