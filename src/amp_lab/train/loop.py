"""One training loop and one evaluation for every precision."""

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from amp_lab.core.files import require_types
from amp_lab.core.precision import Precision, require_backend
from amp_lab.parallel.ranks import ALONE, Ranks
from amp_lab.train.model_outputs import Batch, accuracy, cross_entropy, own_loss, split

Batches = Iterable[Any]
"""One pass over the data, batch by batch, on the CPU, each in a form that `Batch` has."""


@dataclass(frozen=True)
class EpochMetrics:
    """What is known of a finished epoch."""

    epoch: int  # counted from 1
    train_loss: float  # mean over the samples, each at the time it was trained on
    train_accuracy: float  # the metric, likewise: by default the share that is right, from 0 to 1
    test_loss: float  # mean over the test samples after the epoch; NaN without a test set
    test_accuracy: float
    lr: float  # of the last step, and of the first parameter group
    loss_scale: float  # after the epoch; 1 where there is no scaler
    seconds: float  # of the training alone, from where this process took the epoch up
    images_per_s: float  # samples since then, of all processes together, divided by `seconds`


@dataclass
class Progress:
    """How far a training has come, on this rank. `fit` goes on from it, and keeps it up to date."""

    batch: int = 0  # batches done of the current epoch
    samples: int = 0  # in those batches
    # Sums over those samples of the loss, and of the metric, such as whether each was right. They
    # are on the device, so that nothing waits for it.
    loss_sum: Tensor = field(default_factory=lambda: torch.zeros(()))
    correct: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    lr: float = math.nan  # of the last step
    epochs: list[EpochMetrics] = field(default_factory=list)  # the finished ones

    def state_dict(self) -> dict:
        """As plain values, for a checkpoint."""
        state = dict(vars(self))
        state["loss_sum"] = self.loss_sum.cpu()
        state["correct"] = self.correct.cpu()
        state["epochs"] = [vars(epoch) for epoch in self.epochs]
        return state

    @classmethod
    def from_state_dict(cls, state: dict) -> "Progress":
        """What `state_dict` was made from. Raises `TypeError` or `ValueError` for others."""
        epochs = [EpochMetrics(**epoch) for epoch in state["epochs"]]
        fields = state | {"epochs": epochs}
        progress = cls(**fields)
        require_types(progress)
        for metrics in epochs:
            require_types(metrics)
        for name in ("batch", "samples"):
            count = getattr(progress, name)
            if count < 0:
                raise ValueError(f"{name} is {count}")
        for name in ("loss_sum", "correct"):
            if getattr(progress, name).shape != ():
                raise ValueError(f"{name} is no single number")
        return progress

    def finish_epoch(self, metrics: EpochMetrics) -> None:
        """Add the metrics of the current epoch, and begin the next one."""
        self.epochs.append(metrics)
        self.batch = 0
        self.samples = 0
        self.loss_sum.zero_()
        self.correct = torch.zeros_like(self.correct, dtype=torch.int64)


@dataclass
class Loop:
    """The settings of `fit` and `evaluate`, and the steps that both are made of.

    Nothing waits for the device, so long as the optimizer is a fused one: the others make
    `GradScaler.step` read a flag from it.
    """

    model: nn.Module  # where several processes train together, what `Ranks.wrap` returned
    precision: Precision
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None  # None for an evaluation alone
    # The mean, given outputs and targets; None: what the model returns as loss, or `cross_entropy`.
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    # Likewise, a number for each sample or their mean; None for none.
    metric: Callable[[Any, Any], Tensor | float] | None = accuracy
    scaler: torch.amp.GradScaler | None = None  # None: that of the precision
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None  # steps with the optimizer
    # Batches for a step (fewer at the end of an epoch), weighted by their sizes, which is what one
    # large batch would give.
    accumulate: int = 1
    clip_norm: float | None = None  # largest norm of the gradients of a step
    channels_last: bool = False  # whether model and images are put into that memory format
    ranks: Ranks = ALONE  # who train together; the batches are this one's equal share of each
    progress: Progress = field(default_factory=Progress)
    # Called when a step is done, to save it, or to stop there by returning true.
    after_step: Callable[[Progress], bool] = lambda progress: False
    after_epoch: Callable[[EpochMetrics], None] = lambda metrics: None

    def __post_init__(self):
        self.precision = Precision(self.precision)
        self.device = torch.device(self.device)
        require_backend(self.device.type)
        self._scaler = self.scaler or self.precision.grad_scaler(self.device.type)
        self.progress.loss_sum = self.progress.loss_sum.to(self.device)
        self.progress.correct = self.progress.correct.to(self.device)

    def epoch(
        self, batches: Batches, test_batches: Callable[[], Batches] | None
    ) -> EpochMetrics | None:
        """Train on what is left of an epoch and evaluate; None if `after_step` stopped it."""
        progress = self.progress
        ranks = self.ranks
        samples_before = progress.samples
        self.model.train()
        started = time.perf_counter()
        iterator = iter(batches)
        while group := list(itertools.islice(iterator, self.accumulate)):  # the last may be shorter
            self._step(group)
            if self.after_step(progress):
                return None
        samples = progress.samples * ranks.size
        train_loss = (ranks.total(progress.loss_sum) / samples).item()  # waits for the device
        seconds = time.perf_counter() - started
        test_loss = math.nan
        test_accuracy = math.nan
        if test_batches is not None:
            test_loss, test_accuracy = self.evaluate(test_batches())
        new_samples = (progress.samples - samples_before) * ranks.size
        metrics = EpochMetrics(
            epoch=len(progress.epochs) + 1,
            train_loss=train_loss,
            train_accuracy=ranks.total(progress.correct).item() / samples,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            lr=progress.lr,
            loss_scale=self._scaler.get_scale(),
            seconds=seconds,
            images_per_s=new_samples / seconds,
        )
        progress.finish_epoch(metrics)
        return metrics

    def _step(self, group: list[Any]) -> None:
        """One step of the optimizer on the gradients of the batches in `group`."""
        progress = self.progress
        optimizer = self.optimizer
        scaler = self._scaler
        assert optimizer is not None, "an optimizer is needed to train"
        batches = [split(batch, self.model) for batch in group]
        samples = sum(batch.samples for batch in batches)
        for number, batch in enumerate(batches, 1):
            is_last = number == len(group)
            with self.ranks.gradient_sync(self.model, wanted=is_last):
                loss, score = self._forward(batch)
                weight = batch.samples / samples
                scaler.scale(loss * weight).backward()
            progress.loss_sum += loss.detach() * batch.samples
            progress.correct = progress.correct + score
        if self.clip_norm is not None:
            scaler.unscale_(optimizer)  # or the norm would be that of the scaled gradients
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        progress.lr = optimizer.param_groups[0]["lr"]  # before the scheduler changes it
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        progress.batch += len(group)
        progress.samples += samples

    def evaluate(self, batches: Batches) -> tuple[float, float]:
        """Mean loss and metric over `batches`: see the function `evaluate`."""
        model = self.model
        ranks = self.ranks
        was_training = model.training
        loss_sum = torch.zeros((), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        samples = 0
        ranks.share_buffers(model)  # or each would normalise by its own statistics
        model.eval()
        with self.precision.float32_mode(self.device.type), ranks.no_gradients():
            for given in _bar(batches, "evaluation"):
                batch = split(given, model)
                loss, score = self._forward(batch)
                loss_sum += loss * batch.samples
                correct = correct + score
                samples += batch.samples
        model.train(was_training)
        samples = ranks.total(torch.tensor(samples)).item()
        mean_loss = ranks.total(loss_sum).item() / samples
        mean_score = ranks.total(correct).item() / samples
        return mean_loss, mean_score

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean loss of a batch from the CPU, and its metric, summed over the samples."""
        args, kwargs, targets = tree_map_only(Tensor, self._to_device, batch[:3])
        with self.ranks.autocast(self.precision, self.device.type):
            outputs = self.model(*args, **kwargs)  # (N, C) for one class of each sample
            loss = self._loss(outputs, targets)
        return loss, self._score(outputs, targets, batch.samples)

    def _loss(self, outputs: Any, targets: Any) -> Tensor:
        if self.loss_fn is not None:
            return self.loss_fn(outputs, targets)
        loss = own_loss(outputs)
        if loss is None:
            return cross_entropy(outputs, targets)
        return loss

    def _to_device(self, tensor: Tensor) -> Tensor:
        is_image = self.channels_last and tensor.dim() == 4
        memory_format = torch.channels_last if is_image else torch.preserve_format
        # The host goes on at once, and has the next batch ready by the time the device wants it.
        return tensor.to(self.device, non_blocking=True, memory_format=memory_format)

    @torch.no_grad()
    def _score(self, outputs: Any, targets: Any, samples: int) -> Tensor:
        """The sum of the metric over the samples; NaN if there is none."""
        score: Tensor | float = math.nan
        if self.metric is not None:
            score = self.metric(outputs, targets)
        score = torch.as_tensor(score)
        if score.dim() == 1:  # of each sample, such as whether it was right: summed unrounded
            return score.sum()
        return score.float().mean() * samples


def _bar(batches: Batches, description: str) -> tqdm:
    """The batches, with a bar of how many there were, on a terminal alone."""
    return tqdm(batches, description, unit="batch", leave=False, disable=None)


def fit(
    model: nn.Module,
    train_batches: Callable[[int, int], Batches],
    *,
    epochs: int,
    test_batches: Callable[[], Batches] | None = None,
    **settings: Any,
) -> list[EpochMetrics]:
    """Train `model`, which is on its device already; return the metrics of all finished epochs.

    `train_batches(epoch, batch)` gives the batches of an epoch (from 0) from a batch number on, and
    `test_batches()` those to evaluate on after each, in the forms of a `Batch`. The settings are
    the fields of a `Loop`: `precision`, `device` and `optimizer`, and others that are wanted.

    It ends when `epochs` epochs are done, or `after_step(progress)` returns true. To go on from
    there bitwise equal, save `progress` and the states of model, optimizer, scaler, scheduler and
    random generators. Raises `DeviceError` if there is no such device, `OptionError` for a batch
    that it does not take.
    """
    loop = Loop(model, **settings)
    progress = loop.progress
    if loop.channels_last:
        loop.ranks.set_memory_format(model, torch.channels_last)
    # Not only around the forward pass: the backward pass computes in the mode it finds as well.
    with loop.precision.float32_mode(loop.device.type):
        while len(progress.epochs) < epochs:
            epoch = len(progress.epochs)
            batches = train_batches(epoch, progress.batch)
            bar = _bar(batches, f"epoch {epoch + 1}/{epochs}")
            metrics = loop.epoch(bar, test_batches)
            if metrics is None:
                break
            loop.after_epoch(metrics)
    return progress.epochs


def evaluate(model: nn.Module, batches: Batches, **settings: Any) -> tuple[float, float]:
    """Mean loss and metric, by default the accuracy (0 to 1), over `batches`, in evaluation mode.

    The settings are the fields of a `Loop`: `precision`, `device`, and those of the others that are
    wanted. Ranks may have batches of other sizes, but as many. Raises `DeviceError` as `fit` does.
    """
    return Loop(model, **settings).evaluate(batches)
