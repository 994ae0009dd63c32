"""One training loop and one evaluation for every precision."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from amp_lab.core.files import require_types
from amp_lab.core.precision import Precision, require_backend
from amp_lab.parallel.ranks import ALONE, Ranks
from amp_lab.train.model_outputs import Batch, accuracy, cross_entropy, returned_loss, split

Batches = Iterable[Any]
"""One pass over the data: batches on the CPU, each in one of the forms that `Batch` describes."""


@dataclass(frozen=True)
class EpochMetrics:
    """The results of a finished epoch."""

    epoch: int  # counted from 1
    # Means over the training samples of the loss and of the metric, by default the accuracy, 0 to
    # 1. Both are from the forward passes of training, so with the weights before each step.
    train_loss: float
    train_accuracy: float
    # Means over the test samples, with the weights after the epoch; NaN without a test set.
    test_loss: float
    test_accuracy: float
    lr: float  # of the first parameter group, in the last step
    loss_scale: float  # after the epoch; 1 without a scaler
    seconds: float  # of training, without evaluation; in a resumed epoch, since the resume
    images_per_s: float  # samples of all processes together in these `seconds`, per second


@dataclass
class Progress:
    """How far training has come on this rank. `fit` continues from here, and updates the fields."""

    batch: int = 0  # batches done in the current epoch
    samples: int = 0  # samples in those batches
    # Sums over those samples of the loss and of the metric: for the accuracy, the number of samples
    # classified right. They stay on the device, since reading them would wait for it.
    loss_sum: Tensor = field(default_factory=lambda: torch.zeros(()))
    correct: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    lr: float = math.nan  # of the last step
    epochs: list[EpochMetrics] = field(default_factory=list)  # of the finished epochs

    def state_dict(self) -> dict:
        """The fields as plain values and CPU tensors, for a checkpoint."""
        state = dict(vars(self))
        state["loss_sum"] = self.loss_sum.cpu()
        state["correct"] = self.correct.cpu()
        state["epochs"] = [vars(epoch) for epoch in self.epochs]
        return state

    @classmethod
    def from_state_dict(cls, state: dict) -> "Progress":
        """The progress saved by `state_dict`. Raises `TypeError` or `ValueError` if damaged."""
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
                raise ValueError(f"{name} is not a single number")
        return progress

    def finish_epoch(self, metrics: EpochMetrics) -> None:
        """Add the metrics of the current epoch, and set batch, samples and sums to 0."""
        self.epochs.append(metrics)
        self.batch = 0
        self.samples = 0
        self.loss_sum.zero_()
        # A metric may have made it a floating-point tensor; whole numbers are summed exactly.
        self.correct = torch.zeros_like(self.correct, dtype=torch.int64)


@dataclass
class Loop:
    """The settings of `fit` and `evaluate`, and the steps that both consist of.

    Use a fused optimizer, so a step does not wait for the device. With any other optimizer,
    `GradScaler.step` has to wait for the device, to read whether a gradient overflowed.
    """

    model: nn.Module  # with several processes, the module that `Ranks.wrap` returned
    precision: Precision
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None  # None: only for evaluation
    # Takes (outputs, targets), and returns the mean loss. None: the loss that the model returns,
    # and if it returns none, `cross_entropy`.
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    # Takes (outputs, targets), and returns a number for each sample, or their mean. None: the
    # accuracies in `EpochMetrics` are NaN.
    metric: Callable[[Any, Any], Tensor | float] | None = accuracy
    scaler: torch.amp.GradScaler | None = None  # None: the usual one for the precision
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None  # steps with the optimizer
    # Batches for each step; the last step of an epoch may have fewer. They are weighted by their
    # sizes, so that the gradients are those of one large batch.
    accumulate: int = 1
    clip_norm: float | None = None  # largest norm of the gradients of a step
    channels_last: bool = False  # whether model and images are put into that memory format
    ranks: Ranks = ALONE  # the processes that train together; each gets its share of every batch
    progress: Progress = field(default_factory=Progress)
    # Called after each step, as to save a checkpoint; training stops if it returns true.
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
        """Train on the remaining `batches` of an epoch, then evaluate on those of `test_batches()`.

        Returns the metrics, which are also added to `progress`; None if `after_step` stopped the
        epoch. Without `test_batches`, the test loss and accuracy are NaN.
        """
        progress = self.progress
        ranks = self.ranks
        samples_before = progress.samples  # 0, unless a run is resumed within the epoch
        self.model.train()
        start = time.perf_counter()
        for group in _groups(batches, self.accumulate):
            self._step(group)  # this counts the group in `progress`
            if self.after_step(progress):
                return None
        samples = progress.samples * ranks.size  # all ranks have had as many
        train_loss = (ranks.total(progress.loss_sum) / samples).item()
        seconds = time.perf_counter() - start  # complete, since `item` has waited for the device
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
        """Make one step of the optimizer, with the gradients of all batches in `group`.

        Adds the number of batches and samples, and the sums of loss and metric, to `progress`.
        """
        progress = self.progress
        optimizer = self.optimizer
        scaler = self._scaler
        assert optimizer is not None, "an optimizer is needed to train"
        batches = [split(batch, self.model) for batch in group]
        samples = sum(batch.samples for batch in batches)
        for number, batch in enumerate(batches, 1):
            is_last = number == len(group)  # of the step
            # Summing the gradients over the ranks once a step is enough.
            with self.ranks.gradient_sync(self.model, enabled=is_last):
                loss, score = self._forward(batch)
                weight = batch.samples / samples
                scaler.scale(loss * weight).backward()  # adds to the gradients of the group
            progress.loss_sum += loss.detach() * batch.samples
            progress.correct = progress.correct + score  # not in place: `score` may be a float
        if self.clip_norm is not None:
            scaler.unscale_(optimizer)  # so that the norm is that of the true gradients
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
        """Mean loss and mean metric over `batches`: see the function `evaluate`."""
        model = self.model
        ranks = self.ranks
        was_training = model.training
        loss_sum = torch.zeros((), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        samples = 0
        ranks.share_buffers(model)  # each rank has its own running statistics of batch norm
        model.eval()
        with self.precision.float32_mode(self.device.type), ranks.no_gradients():
            for loaded_batch in _bar(batches, "evaluation"):
                batch = split(loaded_batch, model)
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
        """Move a batch to the device and run the model: mean loss (), and sum of the metric ()."""
        on_cpu = (batch.args, batch.kwargs, batch.targets)
        args, kwargs, targets = tree_map_only(Tensor, self._to_device, on_cpu)
        with self.ranks.autocast(self.precision, self.device.type):
            outputs = self.model(*args, **kwargs)  # logits (N, C) for a classifier
            loss = self._loss(outputs, targets)
        return loss, self._score(outputs, targets, batch.samples)

    def _loss(self, outputs: Any, targets: Any) -> Tensor:
        """The mean loss: by `loss_fn`, else the one that the model returns, else cross-entropy."""
        if self.loss_fn is not None:
            return self.loss_fn(outputs, targets)
        loss = returned_loss(outputs)
        if loss is None:
            return cross_entropy(outputs, targets)
        return loss

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device; images (N, C, H, W) in the memory format of the model."""
        is_image = self.channels_last and tensor.dim() == 4
        memory_format = torch.channels_last if is_image else torch.preserve_format
        # Asynchronous, so that the CPU prepares the next batch while the device computes.
        return tensor.to(self.device, non_blocking=True, memory_format=memory_format)

    @torch.no_grad()
    def _score(self, outputs: Any, targets: Any, samples: int) -> Tensor:
        """The sum () of the metric over the samples of a batch; NaN without a metric."""
        score: Tensor | float = math.nan
        if self.metric is not None:
            score = self.metric(outputs, targets)
        score = torch.as_tensor(score)
        if score.dim() == 1:  # a value for each sample; booleans are summed exactly, as integers
            return score.sum()
        return score.float().mean() * samples  # the metric has returned a mean over the samples


def _groups(batches: Batches, size: int) -> Iterator[list[Any]]:
    """Lists of `size` batches, in order; the last list may be shorter."""
    iterator = iter(batches)
    group = list(itertools.islice(iterator, size))
    while group:
        yield group
        group = list(itertools.islice(iterator, size))


def _bar(batches: Batches, description: str) -> tqdm:
    """The same batches; iterating over them shows a progress bar if stderr is a terminal."""
    return tqdm(batches, description, unit="batch", leave=False, disable=None)


def fit(
    model: nn.Module,
    train_batches: Callable[[int, int], Batches],
    *,
    epochs: int,
    test_batches: Callable[[], Batches] | None = None,
    **settings: Any,
) -> list[EpochMetrics]:
    """Train a model, in any precision.

    To resume training with a bitwise equal result, save `progress` and the states of the model, the
    optimizer, the scaler, the scheduler and the random generators.

    Args:
        model: The model. It must already be on its device.
        train_batches: A function of an epoch and a batch number, both counted from 0. It returns
            the batches of this epoch, starting with this batch, in a form that `Batch` describes.
        epochs: The total number of epochs, including finished epochs. Training ends earlier if
            `after_step` returns true.
        test_batches: A function that returns the batches for the evaluation after each epoch.
        **settings: Fields of `Loop`. `precision`, `device` and `optimizer` must be given.

    Returns:
        The `EpochMetrics` of all finished epochs.

    Raises:
        DeviceError: If the device is not in this machine.
        OptionError: If a batch has another form.

    Example:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = (torch.randn(8, 4), torch.randint(3, (8,)))
        settings = {"precision": "bf16", "device": "cpu", "optimizer": optimizer}
        metrics = fit(model, lambda epoch, number: [batch][number:], epochs=2, **settings)
        print(metrics[-1].train_loss)
    """
    loop = Loop(model, **settings)
    progress = loop.progress
    if loop.channels_last:
        loop.ranks.set_memory_format(model, torch.channels_last)
    # Around the whole loop, since the backward pass must compute in this mode as well.
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
    """Compute the mean loss and the mean metric of a model over batches.

    The model is in evaluation mode during the call.

    Args:
        model: The model. It must already be on its device.
        batches: The batches, in a form that `Batch` describes. With several processes, each process
            needs the same number of batches, but the sizes may differ.
        **settings: Fields of `Loop`. `precision` and `device` must be given.

    Returns:
        The mean loss and the mean metric. By default, the metric is the accuracy, from 0 to 1.

    Raises:
        DeviceError: If the device is not in this machine.
        OptionError: If a batch has another form.

    Example:
        batches = [(torch.randn(8, 4), torch.randint(3, (8,)))]
        loss, accuracy = evaluate(nn.Linear(4, 3), batches, precision="fp32", device="cpu")
        print(f"{loss:.3g}, {accuracy:.0%}")
    """
    return Loop(model, **settings).evaluate(batches)
