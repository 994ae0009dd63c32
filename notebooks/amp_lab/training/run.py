"""A training run that lives in a folder: planned once, built once, resumed where it was."""

import math
import os
import random
import signal
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from amp_lab.backends import backend
from amp_lab.checkpoint.run_state import RunParts, export_run, load_run, restore_run, save_run
from amp_lab.data import ImageSet, batches, load_dataset
from amp_lab.device import describe_device, pick_device
from amp_lab.distributed.process_group import join
from amp_lab.distributed.ranks import Ranks, require_same
from amp_lab.errors import AmpLabWarning, RunError
from amp_lab.precision import Precision
from amp_lab.training import run_folder
from amp_lab.training.loop import Batches, EpochMetrics, Loop, Progress
from amp_lab.training.models import build_model, require_values_to_normalise
from amp_lab.training.process import StopSignals, peak_memory
from amp_lab.training.run_config import RunConfig, RunOptions
from amp_lab.training.run_folder import SavedRun

_SEED_STRIDE = 0x9E3779B97F4A7C15  # apart from the seeds that anyone would give beside another


def train(
    config: RunConfig | dict,
    out: str | os.PathLike,
    *,
    say: Callable[[str], None] = print,
    **options,
) -> signal.Signals | None:
    """Train as `config` says, in the folder `out`; the options are those of `RunOptions`.

    Returns None if the run was finished, and else the signal that stopped it, SIGINT or SIGTERM:
    then the state was saved, and `resume` goes on from it. `config` may be a dict of some of the
    settings; a run that is resumed takes the rest from the folder, and starts from the beginning if
    the folder holds no run yet. For the same torch, device and number of threads, a run that was
    killed at any moment and resumed ends bitwise equal to one that was not, on a CPU.

    Into the folder go config.json, metrics.csv (a row per epoch), checkpoint.pt (after each epoch,
    and each `checkpoint_every` steps of the optimizer), loss.png and accuracy.png. `say` gets what
    is to be reported, by line.

    With `parallel`, "ddp" or "fsdp", this is one of several processes that torchrun started, and
    each does its share of every batch. Rank 0 alone writes and says anything, but for the shards of
    FSDP, which all write. A run may go on in another number of processes, or in another way; its
    result then is another one. Where torchrun starts all anew because one was lost, the run goes on
    by itself.

    Raises `RunError`, `DataError`, `DeviceError`, `CheckpointError` or `ParallelError` with one
    line that says why the run cannot start or go on.
    """
    options = RunOptions(out, **options)
    settings = config if isinstance(config, dict) else asdict(config)
    device = pick_device(options.device)
    dtype, timeout_s = options.reduce_dtype, options.timeout
    with (
        join(options.parallel, device, reduce_dtype=dtype, timeout_s=timeout_s) as ranks,
        ExitStack() as held,
    ):
        return prepare(settings, options, ranks, held, say).train()


def export(out: str | os.PathLike, file: str | os.PathLike) -> None:
    """Write the checkpoint of the run in the folder `out`, sharded or not, as one file.

    It is then what a run in one process would have saved, for `load_checkpoint` or `torch.load`.
    Raises `CheckpointError` if there is none, or it is damaged, or the file cannot be written.
    """

    def build(settings: dict, classes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        config = RunConfig(**settings)
        model = build_model(config.model, classes, freeze=config.freeze)
        return model, _optimizer(model, config)

    export_run(Path(out), Path(file), build)


@dataclass(frozen=True)
class Plan:
    """What all ranks do, as rank 0 found it in the command and in the folder."""

    config: RunConfig
    saved: SavedRun | None  # the run in the folder, which goes on; None for a new one


def prepare(
    settings: dict,
    options: RunOptions,
    ranks: Ranks,
    held: ExitStack,
    say: Callable[[str], None] = lambda line: None,
) -> "Run":
    """The run that these ask for, in the state that was saved.

    The ranks agree three times: on a plan, that each could build the run, and on its start. The
    lock of the folder, which rank 0 keeps as long as the run lasts, goes into `held`.
    """
    commands = ranks.gather(
        settings
        | {"parallel": options.parallel, "reduce_dtype": options.reduce_dtype}
        | {"resume": options.resume, "checkpoint_every": options.checkpoint_every}
        | {"device": ranks.device.type, "torch": torch.__version__}
    )
    plan = ranks.first(lambda: _plan(settings, options, commands, held))
    run = ranks.each(lambda: Run(plan, options, ranks, say))
    run.wrap()
    fingerprints = ranks.gather({"images": run.images.fingerprint})
    state = ranks.first(lambda: run.start(fingerprints))
    if state is not None:
        ranks.each(lambda: run.restore(state))
    return run


def _plan(settings: dict, options: RunOptions, commands: list[dict], held: ExitStack) -> Plan:
    """Check all that can be checked before anything is loaded, and take the folder."""
    require_same(commands)
    config, out, size = RunConfig(**settings), Path(options.out), len(commands)
    held.enter_context(run_folder.lock(out))
    saved = run_folder.read_saved(out, settings, options.resume)
    if saved is not None:
        config = saved.config
    if config.batch_size % size:
        problem = f"batch size {config.batch_size} cannot be shared out to {size} processes"
        raise RunError(f"{problem}: give a multiple of {size}")
    return Plan(config, saved)


class Run:
    """A run: made by each rank for itself, then wrapped and started by all together."""

    def __init__(self, plan: Plan, options: RunOptions, ranks: Ranks, say: Callable[[str], None]):
        self.config, self.saved, self.options, self.ranks = plan.config, plan.saved, options, ranks
        self.out = Path(options.out)
        self._say = say
        self.progress = Progress()
        self.steps = 0  # of the optimizer, in this process
        self.stopped_by = 0  # the number of a signal
        config = self.config
        self.images = load_dataset(
            config.dataset,
            options.data,
            image_size=config.image_size,
            limit=config.limit,
            seed=config.seed,
            skip_damaged=config.skip_damaged,
        )
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
        if config.batch_size == ranks.size:
            require_values_to_normalise(self.model, self.images.image_size)
        if config.precision == Precision.FP16 and backend(ranks.device).is_host:
            _warn_of_slow_fp16(ranks.device)

    def _check_images(self) -> None:
        images, size = self.images, self.config.batch_size
        if self.saved is not None and self.saved.images != images.fingerprint:
            data = self.options.data
            raise RunError(f"{data}: not the images that the run in {self.out} was started with")
        if size > len(images.train):
            raise RunError(f"batch size {size} is larger than the {len(images.train)} images")
        if self.ranks.size > len(images.test):
            tests = f"{len(images.test)} test images"
            raise RunError(f"{tests} are too few for {self.ranks.size} processes")

    def wrap(self) -> None:
        """Put the model on the device, for all ranks to train, and make its optimizer."""
        config, ranks, precision = self.config, self.ranks, Precision(self.config.precision)
        if ranks.rank > 0:  # the same weights everywhere, but dropout of one's own
            torch.manual_seed((config.seed + ranks.rank * _SEED_STRIDE) % 2**63)
        if config.channels_last:
            ranks.set_memory_format(self.model, torch.channels_last)  # which DDP's buckets copy
        self.trained = ranks.wrap(self.model, precision)
        if config.compile:
            self.trained.compile()
        optimizer = _optimizer(self.model, config)
        steps = math.ceil(len(self.images.train) // config.batch_size / config.accumulate)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=config.lr, total_steps=steps * config.epochs
        )
        scaler = precision.grad_scaler(ranks.device.type)
        self.parts = RunParts(self.model, optimizer, scheduler, scaler, ranks)

    def start(self, fingerprints: list[dict]) -> dict | None:
        """Write the settings of a new run, or return the state of the one that goes on."""
        require_same(fingerprints)
        environment = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {self.ranks}"
        if self.saved is None:
            new = SavedRun(self.config, self.images.fingerprint, environment)
            run_folder.write_config(self.out, new)
        elif self.saved.environment != environment:
            self.say(f"Started with {self.saved.environment}; goes on with {environment}:")
            self.say("the result may differ.")
        state = load_run(self.out, asdict(self.config))
        if state is None and (self.options.resume or self.saved is not None):
            self.say(f"Nothing was saved in {self.out} yet: starting from the beginning.")
        return state

    def restore(self, state: dict) -> None:
        """Go on from a state that was saved; raises `CheckpointError` if it does not fit."""
        self.progress = Progress.from_state_dict(restore_run(self.out, state, self.parts))

    def save(self) -> None:
        """Save the state; all ranks must call it."""
        description = {"config": asdict(self.config), "classes": len(self.images.classes)}
        save_run(self.out, self.parts, self.progress.state_dict(), description)

    def say(self, line: str) -> None:
        """Report a line, on rank 0 alone."""
        if self.ranks.rank == 0:
            self._say(line)

    def train(self) -> signal.Signals | None:
        """Train to the end, or until a signal, which is returned."""
        config, progress, ranks, parts = self.config, self.progress, self.ranks, self.parts
        self._describe()
        ranks.first(lambda: run_folder.write_metrics(self.out, progress.epochs))
        with StopSignals() as stop, warnings.catch_warnings():
            # None of torchvision's models writes into what a block of it returns.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            loop = Loop(
                self.trained,
                config.precision,
                ranks.device,
                parts.optimizer,
                scaler=parts.scaler,
                scheduler=parts.scheduler,
                accumulate=config.accumulate,
                clip_norm=config.clip_norm,
                channels_last=config.channels_last,
                ranks=ranks,
                progress=progress,
                after_step=lambda _: self._after_step(stop.signal),
                after_epoch=self._after_epoch,
            )
            loop.run(self._train_batches, config.epochs, self._test_batches)
        if len(progress.epochs) < config.epochs:
            place = f"epoch {len(progress.epochs) + 1} after {progress.batch} batches"
            self.say(f"Stopped in {place}; saved: --resume goes on from there.")
            return signal.Signals(self.stopped_by)
        peak = max(ranks.gather(peak_memory(ranks.device)))
        ranks.first(lambda: self._summarise(peak))
        return None

    def _after_step(self, signal_here: int) -> bool:
        self.steps += 1
        # A signal to one rank stops all, at the same step.
        self.stopped_by = self.ranks.largest_before(signal_here)
        every = self.options.checkpoint_every
        if self.stopped_by or (every and self.steps % every == 0):
            self.save()
        return bool(self.stopped_by)

    def _after_epoch(self, metrics: EpochMetrics) -> None:
        self.ranks.first(lambda: run_folder.append_metrics(self.out, metrics))
        self.save()
        self.say(
            f"epoch {metrics.epoch:3d}  loss {metrics.train_loss:.4f}  "
            f"accuracy {metrics.train_accuracy:.2%}  test loss {metrics.test_loss:.4f}  "
            f"test accuracy {metrics.test_accuracy:.2%}  {metrics.images_per_s:.0f} images/s"
        )

    def _train_batches(self, epoch: int, batch: int) -> Batches:
        order = {"epoch": epoch, "seed": self.config.seed, "start": batch, "drop_last": True}
        return self._batches(self.images.train, **order)

    def _test_batches(self) -> Batches:
        return self._batches(self.images.test)

    def _batches(self, images: ImageSet, **order: object) -> Batches:
        workers, share = self.options.workers, (self.ranks.rank, self.ranks.size)
        if workers is None:  # none for images that wait in memory, else one per core up to 8
            waits = self.config.dataset != "caltech256"
            workers = 0 if waits else min(8, os.cpu_count() or 1)
        options = {"share": share, "workers": workers, "device": self.ranks.device}
        return batches(images, self.config.batch_size, **options, **order)

    def _describe(self) -> None:
        config, images, progress = self.config, self.images, self.progress
        kind = " (generated stand-in)" if images.stand_in else ""
        self.say(
            f"{images.name}{kind}: {len(images.train)} training and {len(images.test)} test images "
            f"of {images.image_size}x{images.image_size}, {len(images.classes)} classes"
        )
        if images.skipped:
            self.say(f"left out as damaged: {len(images.skipped)} ({', '.join(images.skipped)})")
        every = sum(p.numel() for p in self.model.parameters())
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        where = f"{self.ranks.device}, {self.ranks}" if self.ranks.kind else self.ranks.device
        self.say(
            f"{config.model}: {every:,} parameters, {trained:,} trained; "
            f"{config.precision} on {where}"
        )
        if progress.epochs or progress.batch:
            place = f"epoch {len(progress.epochs) + 1} after {progress.batch} batches"
            self.say(f"Resuming in {place}.")

    def _summarise(self, peak_bytes: int) -> None:
        epochs = self.progress.epochs
        run_folder.draw_curves(self.out, epochs)
        seconds = sum(epoch.seconds for epoch in epochs)  # before and after a stop
        rate = sum(epoch.images_per_s * epoch.seconds for epoch in epochs) / seconds
        of_one = " of a process" if self.ranks.size > 1 else ""
        self.say(
            f"Trained {len(epochs)} epochs in {seconds:.1f} s, {rate:.0f} images/s, "
            f"peak memory {peak_bytes / 2**20:.0f} MiB{of_one}"
        )


def _optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=config.lr, fused=True)  # which waits for no scaler's flag


def _warn_of_slow_fp16(device: torch.device) -> None:
    speedup = describe_device(device).speedup(Precision.FP16)
    if speedup < 0.5:
        warnings.warn(
            f"fp16: a matrix product takes {1 / speedup:.0f} times as long as in fp32 on this CPU; "
            "bf16 needs no more memory",
            AmpLabWarning,
            stacklevel=4,
        )
