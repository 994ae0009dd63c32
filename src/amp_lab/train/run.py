"""A training run that lives in a folder: planned once, built once, resumed where it was."""

import math
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from amp_lab.core.backends import backend
from amp_lab.core.cpu import onednn_has_fp16
from amp_lab.core.device import describe_device, pick_device
from amp_lab.core.errors import AmpLabWarning, RunError
from amp_lab.core.precision import Precision
from amp_lab.core.report import plural
from amp_lab.models.build import build_model, require_images_that_fit
from amp_lab.parallel.ranks import Ranks, require_same
from amp_lab.train import run_folder
from amp_lab.train.checkpoint import run_state
from amp_lab.train.data import COME_WITH_LIBRARIES, ImageSet, batches
from amp_lab.train.data.tokens import BPE
from amp_lab.train.distributed.process_group import join
from amp_lab.train.loop import Batches, EpochMetrics, Progress, fit
from amp_lab.train.run_data import load_data, locate_data, require_match
from amp_lab.train.stop_signals import StopSignals
from amp_lab.train.train_options import RunConfig, RunOptions


def train(
    config: RunConfig | dict,
    out: str | os.PathLike,
    *,
    say: Callable[[str], None] = print,
    **options: Any,
) -> signal.Signals | None:
    """Train as `config` says, in the folder `out`; the options are those of `RunOptions`.

    Returns None if the run was finished, else the signal that stopped it, with its state saved.
    `config` may be a dict of some settings; a run that is resumed takes the rest from its folder.
    For the same torch, device and number of threads, a run that was killed at any moment and
    resumed ends bitwise equal to one that was not, on a CPU. `say` gets each line to report. Into
    the folder go config.json, metrics.csv, checkpoint.pt, loss.png and accuracy.png.

    With `parallel`, "ddp" or "fsdp", this is one of the processes that torchrun started, and does
    its share of every batch. A run may go on in another number of them or another way, with another
    result then. Where torchrun starts all anew because one was lost, the run goes on by itself.

    Raises `RunError`, `DataError`, `DeviceError`, `CheckpointError` or `ParallelError` with one
    line that says why the run cannot start or go on.
    """
    given = RunOptions(os.fspath(out), **options)
    settings = config if isinstance(config, dict) else asdict(config)
    group = join(
        given.parallel,
        pick_device(given.device),
        reduce_dtype=given.reduce_dtype,
        timeout_s=given.timeout,
    )
    with group as ranks, ExitStack() as held:
        return Run(settings, given, ranks, held, say).train()


_SAME_ON_ALL_RANKS = ("parallel", "reduce_dtype", "resume", "checkpoint_every")
_SCHEDULE_LENGTH = ("total_steps", "_schedule_phases")  # what a `OneCycleLR` keeps of it
_EXP_ARGUMENT_LIMIT = 700  # e^700 is a float


class Run:
    """A run on this rank, ready to be trained from the state that was saved.

    The ranks agree three times: on what to do, that each could build the run, and on its start. The
    lock of the folder, which rank 0 keeps as long as the run lasts, goes into `held`.
    """

    def __init__(
        self,
        settings: dict,
        options: RunOptions,
        ranks: Ranks,
        held: ExitStack,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.options = options
        self.ranks = ranks
        self.out = Path(options.out)
        self.progress = Progress()
        self._print = say
        self._steps = 0  # of the optimizer, in this process
        self._stopped_by = 0  # the number of a signal
        commands = ranks.gather(self._command(settings))
        # `_saved` is the run in the folder, which goes on; None for a new one.
        self.config, self._saved = ranks.first(lambda: self._plan(settings, commands, held))
        ranks.each(self._build)
        self._wrap()
        fingerprints = ranks.gather({"images": self.images.fingerprint})
        state = ranks.first(lambda: self._start(fingerprints))
        if state is not None:
            self._restore(state)

    def _say(self, line: str) -> None:
        if self.ranks.rank == 0:
            self._print(line)

    def _command(self, settings: dict) -> dict:
        """What this rank was started with, and on; it has to be the same on all ranks."""
        command = dict(settings)
        for name in _SAME_ON_ALL_RANKS:
            command[name] = getattr(self.options, name)
        command["device"] = self.ranks.device.type
        command["torch"] = torch.__version__
        return command

    def _plan(
        self, settings: dict, commands: list[dict], held: ExitStack
    ) -> tuple[RunConfig, run_folder.SavedRun | None]:
        """Check all that can be checked before anything is loaded, and take the folder."""
        require_same(commands)
        config_file = self.out / run_folder.CONFIG
        if self.options.resume and not settings and not config_file.exists():
            raise RunError(f"{self.out}: no run to resume; to start one, give settings as well")
        tokenizer = settings.get("tokenizer")
        if tokenizer not in (None, BPE):  # a file, which is found from another folder too
            settings = settings | {"tokenizer": os.path.abspath(str(tokenizer))}
        config = RunConfig(**settings)
        size = len(commands)
        held.enter_context(run_folder.lock(self.out))
        saved = run_folder.read_saved(self.out, settings, self.options.resume)
        if saved is not None:
            config = replace(saved.config, epochs=settings.get("epochs", saved.config.epochs))
        if config.batch_size % size:
            problem = f"batch size {config.batch_size} cannot be shared out to {size} processes"
            raise RunError(f"{problem}: give a multiple of {size}")
        return config, saved

    def _build(self) -> None:
        """Load the images and make the model, each rank for itself."""
        config = self.config
        require_match(config)
        self._data = locate_data(config, self.options.data, self._saved, self.out)
        self.images = load_data(config, self._data)
        self._check_images()
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        torch.manual_seed(config.seed)
        self.model = build_model(
            config.model,
            len(self.images.classes),
            pretrained=config.pretrained,
            freeze=config.freeze,
        )
        if not self.images.is_text:
            count = min(2, config.batch_size // self.ranks.size)  # more make no difference
            require_images_that_fit(self.model, count, self.images.image_size)
        if config.precision == Precision.FP16 and backend(self.ranks.device).is_host:
            _warn_of_slow_fp16(self.ranks.device)

    def _check_images(self) -> None:
        images = self.images
        if self._saved is not None and self._saved.images != images.fingerprint:
            kind = "text, or other tokens than" if images.is_text else "images"
            raise RunError(
                f"{self._data}: not the {kind} that the run in {self.out} was started with"
            )
        size = self.config.batch_size
        if size > len(images.train):
            raise RunError(f"batch size {size} is larger than the {len(images.train)} images")
        if self.ranks.size > len(images.test):
            raise RunError(
                f"{len(images.test)} test images are too few for {self.ranks.size} processes"
            )

    def _wrap(self) -> None:
        """Put the model on the device, for all ranks to train, and make its optimizer."""
        config = self.config
        ranks = self.ranks
        precision = Precision(config.precision)
        if ranks.rank > 0:  # the same weights everywhere, but dropout of one's own: far apart
            torch.manual_seed((config.seed + ranks.rank * 0x9E3779B97F4A7C15) % 2**63)
        if config.channels_last:
            ranks.set_memory_format(self.model, torch.channels_last)  # which DDP's buckets copy
        self.trained = ranks.wrap(self.model, precision)
        if config.compile:
            self.trained.compile()
        optimizer = make_optimizer(self.model, config)
        steps = config.epochs * self._steps_for(self._batches_per_epoch)
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, steps),
            "scaler": precision.grad_scaler(ranks.device.type),
        }

    @property
    def _batches_per_epoch(self) -> int:
        return len(self.images.train) // self.config.batch_size

    def _steps_for(self, batches: int) -> int:
        """Steps of the optimizer for the first so many batches of an epoch."""
        return math.ceil(batches / self.config.accumulate)

    def _start(self, fingerprints: list[dict]) -> dict | None:
        """Write the settings of a new run, or return the state of the one that goes on."""
        require_same(fingerprints)
        environment = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {self.ranks}"
        self._write_config(environment)
        saved = self._saved
        if saved is not None and saved.environment != environment:
            self._say(f"Started with {saved.environment}; goes on with {environment}:")
            self._say("the result may differ.")
        if saved is not None and saved.config != self.config:
            self._say(f"More epochs, {self.config.epochs} now: the learning rates are theirs.")
        state = run_state.load_run(self.out, asdict(self.config))
        has_begun = self.options.resume or saved is not None
        if state is None and has_begun:
            self._say(f"Nothing was saved in {self.out} yet: starting from the beginning.")
        return state

    def _restore(self, state: dict) -> None:
        """Go on from the state that was saved, on every rank."""

        def restore() -> Progress:
            return run_state.restore_run(
                self.out, state, self.ranks, self.parts, self._restored_progress
            )

        scheduler = vars(self.parts["scheduler"])
        length = {name: scheduler[name] for name in _SCHEDULE_LENGTH}
        self.progress = self.ranks.each(restore)
        scheduler.update(length)  # it was saved with that of fewer epochs, maybe

    def _restored_progress(self, saved: dict) -> Progress:
        """The progress that was saved. Raises `TypeError` or `ValueError` if it cannot be."""
        progress = Progress.from_state_dict(saved)
        config = self.config
        batches = self._batches_per_epoch
        epochs = len(progress.epochs)
        done = f"{epochs} epochs and {progress.batch} batches"
        if epochs > config.epochs or progress.batch > batches:
            raise ValueError(f"{done}, of {config.epochs} epochs of {batches} batches")
        if (progress.samples > 0) != (progress.batch > 0):
            raise ValueError(f"{progress.samples} samples in {progress.batch} batches")
        steps = epochs * self._steps_for(batches) + self._steps_for(progress.batch)
        if steps != self.parts["scheduler"].last_epoch:
            raise ValueError(f"{done}, and another number of steps")
        return progress

    def _write_config(self, environment: str) -> None:
        """Write the settings of a new run, or what is another now of one that goes on."""
        data = None
        if self.config.dataset not in COME_WITH_LIBRARIES:
            data = os.path.abspath(self._data)
        if self._saved is None:
            run = run_folder.SavedRun(self.config, self.images.fingerprint, environment, data)
        else:
            run = replace(self._saved, config=self.config, data=data)
        if run != self._saved:
            run_folder.write_config(self.out, run)

    def save(self) -> None:
        """Save the state; all ranks must call it."""
        description = {
            "config": asdict(self.config),
            "classes": len(self.images.classes),
        }
        if self.images.tokens is not None:
            description |= self.images.tokens.saved
        progress = self.progress.state_dict()
        run_state.save_run(self.out, self.ranks, self.parts, progress, description)

    def train(self) -> signal.Signals | None:
        """Train to the end, or until a signal, which is returned."""
        self._describe()
        self._write_metrics()  # a kill may have come between the last row and its checkpoint
        with StopSignals() as stop, warnings.catch_warnings():
            # None of torchvision's models writes into what a block of it returns.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            self._fit(stop)
        if len(self.progress.epochs) < self.config.epochs:
            self._say(f"Stopped in {self._position()}; saved: --resume goes on from there.")
            return signal.Signals(self._stopped_by)
        peak = max(self.ranks.gather(_peak_memory(self.ranks.device)))
        self.ranks.first(lambda: self._summarise(peak))
        return None

    def _fit(self, stop: StopSignals) -> None:
        """Train to the end, or until a signal has come to any rank."""
        config = self.config

        def train_batches(epoch: int, batch: int) -> Batches:
            return self._batches(
                self.images.train, epoch=epoch, seed=config.seed, start=batch, drop_last=True
            )

        def test_batches() -> Batches:
            return self._batches(self.images.test)

        def after_step(_: Progress) -> bool:
            return self._after_step(stop.signal)

        fit(
            self.trained,
            train_batches,
            epochs=config.epochs,
            test_batches=test_batches,
            precision=config.precision,
            device=self.ranks.device,
            optimizer=self.parts["optimizer"],
            scheduler=self.parts["scheduler"],
            scaler=self.parts["scaler"],
            accumulate=config.accumulate,
            clip_norm=config.clip_norm,
            channels_last=config.channels_last,
            ranks=self.ranks,
            progress=self.progress,
            after_step=after_step,
            after_epoch=self._after_epoch,
        )

    def _write_metrics(self) -> None:
        self.ranks.first(lambda: run_folder.write_metrics(self.out, self.progress.epochs))

    def _after_step(self, signal_here: int) -> bool:
        self._steps += 1
        # A signal to one rank stops all, at the same step.
        self._stopped_by = self.ranks.largest_before(signal_here)
        every = self.options.checkpoint_every
        is_due = every is not None and self._steps % every == 0
        if self._stopped_by or is_due:
            self.save()
        return bool(self._stopped_by)

    def _after_epoch(self, metrics: EpochMetrics) -> None:
        self._write_metrics()  # before the checkpoint that counts the epoch as done
        self.save()
        self._say(
            f"epoch {metrics.epoch:3d}  loss {metrics.train_loss:.4f}  "
            f"accuracy {metrics.train_accuracy:.2%}  test loss {metrics.test_loss:.4f}  "
            f"test accuracy {metrics.test_accuracy:.2%}  {self._rate(metrics.images_per_s)}"
        )
        is_nonfinite = [not math.isfinite(epoch.train_loss) for epoch in self.progress.epochs]
        if sum(is_nonfinite) == 1:  # so that it is said once
            self._say("The loss is not finite: try a lower --lr, or find the op (find_nonfinite).")

    def _rate(self, per_second: float) -> str:
        """Images a second, or the tokens of passages; with the perplexity of the last test."""
        if not self.images.is_text:
            return f"{per_second:.0f} images/s"
        test_loss = self.progress.epochs[-1].test_loss
        perplexity = math.exp(min(test_loss, _EXP_ARGUMENT_LIMIT))
        tokens = per_second * self.images.image_size
        return f"perplexity {perplexity:.4g}  {tokens:.0f} tokens/s"

    def _batches(self, images: ImageSet, **order: Any) -> Batches:
        ranks = self.ranks
        return batches(
            images,
            self.config.batch_size,
            share=(ranks.rank, ranks.size),
            workers=self._workers_for(images),
            device=ranks.device,
            **order,
        )

    def _workers_for(self, images: ImageSet) -> int:
        if self.options.workers is not None:
            return self.options.workers
        if not images.reads_files:  # they wait in memory
            return 0
        return min(8, os.cpu_count() or 1)

    def _describe(self) -> None:
        config = self.config
        images = self.images
        self._say(images.described)
        if images.name == "stdlib":
            self._say("The text is Python's standard library, under the PSF licence.")
        if images.skipped:
            self._say(f"left out as damaged: {len(images.skipped)} ({', '.join(images.skipped)})")
        size = _count_parameters(self.model)
        where = str(self.ranks.device)
        if self.ranks.kind is not None:
            where += f", {self.ranks}"
        self._say(f"{config.model}: {size}; {config.precision} on {where}")
        if self.progress.epochs or self.progress.batch:
            self._say(f"Resuming in {self._position()}.")

    def _position(self) -> str:
        return f"epoch {len(self.progress.epochs) + 1} after {self.progress.batch} batches"

    def _summarise(self, peak_bytes: int) -> None:
        epochs = self.progress.epochs
        run_folder.draw_curves(self.out, epochs)
        seconds = sum(epoch.seconds for epoch in epochs)  # before and after a stop
        rate = sum(epoch.images_per_s * epoch.seconds for epoch in epochs) / seconds
        memory = f"peak memory {peak_bytes / 2**20:.0f} MiB"
        if self.ranks.size > 1:
            memory += " of a process"
        trained = f"Trained {plural(len(epochs), 'epoch')} in {seconds:.1f} s"
        self._say(f"{trained}, {self._rate(rate)}, {memory}")


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """The optimizer of a run, for the parameters of its model that are trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=config.lr, fused=True)  # which waits for no scaler's flag


def _count_parameters(model: nn.Module) -> str:
    total = 0
    trained = 0
    for parameter in model.parameters():
        total += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()
    return f"{total:,} parameters, {trained:,} trained"


def _warn_of_slow_fp16(device: torch.device) -> None:
    report = describe_device(device)
    speedup = report.speedup(Precision.FP16)
    if report.trusted and speedup < 0.5:
        reason = f"a matrix product takes {1 / speedup:.0f} times as long as in fp32 on this CPU"
    elif not report.trusted and not onednn_has_fp16():
        reason = "this CPU has no instructions for it, so that it is slow"
    else:
        return
    warnings.warn(f"fp16: {reason}; bf16 needs no more memory", AmpLabWarning, stacklevel=4)


def _peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on an accelerator that keeps count, else of this process."""
    if backend(device).keeps_peak:
        return torch.accelerator.max_memory_allocated(device)
    import resource  # which Windows has not

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
