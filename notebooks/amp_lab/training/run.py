"""A training run that lives in a folder: planned once, built once, resumed where it was."""

import math
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from amp_lab.backends import backend
from amp_lab.checkpoint import run_state
from amp_lab.cpu import onednn_has_fp16
from amp_lab.data import (
    COME_WITH_LIBRARIES,
    TEXTS,
    USERS_OWN,
    ImageData,
    ImageSet,
    batches,
    load_dataset,
    load_text,
)
from amp_lab.data.tokens import BPE
from amp_lab.device import describe_device, pick_device
from amp_lab.distributed.process_group import join
from amp_lab.distributed.ranks import Ranks, require_same
from amp_lab.errors import AmpLabWarning, RunError
from amp_lab.precision import Precision
from amp_lab.report import plural
from amp_lab.training import run_folder
from amp_lab.training.gpt import SIZES
from amp_lab.training.loop import Batches, EpochMetrics, Progress, fit
from amp_lab.training.models import build_model, require_images_that_fit
from amp_lab.training.train_options import RunConfig, RunOptions


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
    how = {"reduce_dtype": given.reduce_dtype, "timeout_s": given.timeout}
    with join(given.parallel, pick_device(given.device), **how) as ranks, ExitStack() as held:
        return Run(settings, given, ranks, held, say).train()


TEXT_SETTINGS = ("context", "tokenizer", "vocabulary")
_USUAL_PLACE = "data"  # of data sets that are downloaded
_OF_ALL_EPOCHS = ("total_steps", "_schedule_phases")  # what a `OneCycleLR` keeps of its length


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
        self.options, self.ranks = options, ranks
        self._say = say if ranks.rank == 0 else lambda line: None
        self.out, self.progress = Path(options.out), Progress()
        self._steps = 0  # of the optimizer, in this process
        self._stopped_by = 0  # the number of a signal
        alike = ("parallel", "reduce_dtype", "resume", "checkpoint_every")
        command = settings | {name: getattr(options, name) for name in alike}
        machine = {"device": ranks.device.type, "torch": torch.__version__}
        commands = ranks.gather(command | machine)
        # `_saved` is the run in the folder, which goes on; None for a new one.
        self.config, self._saved = ranks.first(lambda: self._plan(settings, commands, held))
        ranks.each(self._build)
        self._wrap()
        fingerprints = ranks.gather({"images": self.images.fingerprint})
        state = ranks.first(lambda: self._start(fingerprints))
        if state is not None:
            given = self.out, state, ranks, self.parts, self._progress
            scheduler = self.parts["scheduler"]
            of_all_epochs = {name: vars(scheduler)[name] for name in _OF_ALL_EPOCHS}
            self.progress = ranks.each(lambda: run_state.restore_run(*given))
            vars(scheduler).update(of_all_epochs)  # of which there were fewer, maybe

    def _plan(
        self, settings: dict, commands: list[dict], held: ExitStack
    ) -> tuple[RunConfig, run_folder.SavedRun | None]:
        """Check all that can be checked before anything is loaded, and take the folder."""
        require_same(commands)
        if self.options.resume and not settings and not (self.out / run_folder.CONFIG).exists():
            raise RunError(f"{self.out}: no run to resume; to start one, give settings as well")
        tokenizer = settings.get("tokenizer")
        if tokenizer not in (None, BPE):  # a file, which is found from another folder too
            settings = settings | {"tokenizer": os.path.abspath(str(tokenizer))}
        config, size = RunConfig(**settings), len(commands)
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
        _require_a_match(config)
        self._data = self._place_of_data()
        self.images = load_data(config, self._data)
        self._check_images()
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        torch.manual_seed(config.seed)
        classes, pretrained = len(self.images.classes), config.pretrained
        self.model = build_model(config.model, classes, pretrained=pretrained, freeze=config.freeze)
        if not self.images.is_text:
            count = min(2, config.batch_size // self.ranks.size)  # more make no difference
            require_images_that_fit(self.model, count, self.images.image_size)
        if config.precision == Precision.FP16 and backend(self.ranks.device).is_host:
            _warn_of_slow_fp16(self.ranks.device)

    def _place_of_data(self) -> str:
        """Where the data are; raises `RunError` if that is not known, or said without need."""
        dataset, given, saved = self.config.dataset, self.options.data, self._saved
        if dataset in COME_WITH_LIBRARIES and given is not None:
            raise RunError(
                f"--data {given}: {dataset} comes with a library and takes none; your own images "
                "are --dataset folder, and your own text is --dataset text"
            )
        if given is not None:
            return given
        if saved is not None and saved.data is not None:
            if not os.path.exists(saved.data):
                moved = f"its data were at {saved.data}, and are not there now"
                raise RunError(f"{self.out}: {moved}; give --data with where they are")
            return saved.data
        # A run that an older version began may have found them in the folder that is the default.
        if saved is None or not os.path.exists(_USUAL_PLACE):
            _require_no_place_of_yours(dataset)
        return _USUAL_PLACE

    def _check_images(self) -> None:
        images, size = self.images, self.config.batch_size
        if self._saved is not None and self._saved.images != images.fingerprint:
            what = "text, or other tokens than" if images.is_text else "images"
            raise RunError(
                f"{self._data}: not the {what} that the run in {self.out} was started with"
            )
        if size > len(images.train):
            raise RunError(f"batch size {size} is larger than the {len(images.train)} images")
        if self.ranks.size > len(images.test):
            tests = f"{len(images.test)} test images"
            raise RunError(f"{tests} are too few for {self.ranks.size} processes")

    def _wrap(self) -> None:
        """Put the model on the device, for all ranks to train, and make its optimizer."""
        config, ranks, precision = self.config, self.ranks, Precision(self.config.precision)
        if ranks.rank > 0:  # the same weights everywhere, but dropout of one's own: far apart
            torch.manual_seed((config.seed + ranks.rank * 0x9E3779B97F4A7C15) % 2**63)
        if config.channels_last:
            ranks.set_memory_format(self.model, torch.channels_last)  # which DDP's buckets copy
        self.trained = ranks.wrap(self.model, precision)
        if config.compile:
            self.trained.compile()
        optimizer = make_optimizer(self.model, config)
        steps = math.ceil(len(self.images.train) // config.batch_size / config.accumulate)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, steps * config.epochs)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": optimizer}
        self.parts |= {"scheduler": scheduler, "scaler": precision.grad_scaler(ranks.device.type)}

    def _start(self, fingerprints: list[dict]) -> dict | None:
        """Write the settings of a new run, or return the state of the one that goes on."""
        require_same(fingerprints)
        environment = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {self.ranks}"
        self._write_config(environment)
        if self._saved is not None and self._saved.environment != environment:
            self._say(f"Started with {self._saved.environment}; goes on with {environment}:")
            self._say("the result may differ.")
        if self._saved is not None and self._saved.config != self.config:
            self._say(f"More epochs, {self.config.epochs} now: the learning rates are theirs.")
        state = run_state.load_run(self.out, asdict(self.config))
        if state is None and (self.options.resume or self._saved is not None):
            self._say(f"Nothing was saved in {self.out} yet: starting from the beginning.")
        return state

    def _progress(self, saved: dict) -> Progress:
        """The progress that was saved. Raises `TypeError` or `ValueError` if it cannot be."""
        progress, config = Progress.from_state_dict(saved), self.config
        batches = len(self.images.train) // config.batch_size  # of an epoch
        done = f"{len(progress.epochs)} epochs and {progress.batch} batches"
        if len(progress.epochs) > config.epochs or progress.batch > batches:
            raise ValueError(f"{done}, of {config.epochs} epochs of {batches} batches")
        if (progress.samples > 0) != (progress.batch > 0):
            raise ValueError(f"{progress.samples} samples in {progress.batch} batches")
        steps = len(progress.epochs) * math.ceil(batches / config.accumulate)
        steps += math.ceil(progress.batch / config.accumulate)
        if steps != self.parts["scheduler"].last_epoch:
            raise ValueError(f"{done}, and another number of steps")
        return progress

    def _write_config(self, environment: str) -> None:
        """Write the settings of a new run, or what is another now of one that goes on."""
        comes_along = self.config.dataset in COME_WITH_LIBRARIES
        data = None if comes_along else os.path.abspath(self._data)
        now = run_folder.SavedRun(self.config, self.images.fingerprint, environment, data)
        if self._saved is not None:
            now = replace(self._saved, config=self.config, data=data)
        if now != self._saved:
            run_folder.write_config(self.out, now)

    def save(self) -> None:
        """Save the state; all ranks must call it."""
        description: dict[str, Any] = {"config": asdict(self.config)}
        description["classes"] = len(self.images.classes)
        if self.images.tokens is not None:
            description |= self.images.tokens.saved
        progress = self.progress.state_dict()
        run_state.save_run(self.out, self.ranks, self.parts, progress, description)

    def train(self) -> signal.Signals | None:
        """Train to the end, or until a signal, which is returned."""
        config, progress, ranks = self.config, self.progress, self.ranks
        self._describe()
        # A kill may have come between the last row and its checkpoint.
        ranks.first(lambda: run_folder.write_metrics(self.out, progress.epochs))
        with _StopSignals() as stop, warnings.catch_warnings():
            # None of torchvision's models writes into what a block of it returns.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            fit(
                train_batches=lambda epoch, batch: self._batches(
                    self.images.train, epoch=epoch, seed=config.seed, start=batch, drop_last=True
                ),
                epochs=config.epochs,
                test_batches=lambda: self._batches(self.images.test),
                precision=config.precision,
                device=ranks.device,
                accumulate=config.accumulate,
                clip_norm=config.clip_norm,
                channels_last=config.channels_last,
                ranks=ranks,
                progress=progress,
                after_step=lambda _: self._after_step(stop.signal),
                after_epoch=self._after_epoch,
                **self.parts | {"model": self.trained},
            )
        if len(progress.epochs) < config.epochs:
            self._say(f"Stopped in {self._place()}; saved: --resume goes on from there.")
            return signal.Signals(self._stopped_by)
        peak = max(ranks.gather(_peak_memory(ranks.device)))
        ranks.first(lambda: self._summarise(peak))
        return None

    def _after_step(self, signal_here: int) -> bool:
        self._steps += 1
        # A signal to one rank stops all, at the same step.
        self._stopped_by = self.ranks.largest_before(signal_here)
        every = self.options.checkpoint_every
        if self._stopped_by or (every and self._steps % every == 0):
            self.save()
        return bool(self._stopped_by)

    def _after_epoch(self, metrics: EpochMetrics) -> None:
        # Before the checkpoint that counts the epoch as done.
        self.ranks.first(lambda: run_folder.write_metrics(self.out, self.progress.epochs))
        self.save()
        self._say(
            f"epoch {metrics.epoch:3d}  loss {metrics.train_loss:.4f}  "
            f"accuracy {metrics.train_accuracy:.2%}  test loss {metrics.test_loss:.4f}  "
            f"test accuracy {metrics.test_accuracy:.2%}  {self._rate(metrics.images_per_s)}"
        )
        lost = [epoch for epoch in self.progress.epochs if not math.isfinite(epoch.train_loss)]
        if len(lost) == 1:
            self._say("The loss is not finite: try a lower --lr, or find the op (find_nonfinite).")

    def _rate(self, per_second: float) -> str:
        """Images a second, or the tokens of passages; with the perplexity of the last test."""
        if not self.images.is_text:
            return f"{per_second:.0f} images/s"
        perplexity = math.exp(min(self.progress.epochs[-1].test_loss, 700))  # e^700 is a float
        tokens = per_second * self.images.image_size
        return f"perplexity {perplexity:.4g}  {tokens:.0f} tokens/s"

    def _batches(self, images: ImageSet, **order: Any) -> Batches:
        workers, ranks = self.options.workers, self.ranks
        if workers is None:  # none for images that wait in memory, else one per core up to 8
            workers = min(8, os.cpu_count() or 1) if images.reads_files else 0
        order |= {"share": (ranks.rank, ranks.size), "workers": workers, "device": ranks.device}
        return batches(images, self.config.batch_size, **order)

    def _describe(self) -> None:
        config, images, progress = self.config, self.images, self.progress
        self._say(images.described)
        if images.name == "stdlib":
            self._say("The text is Python's standard library, under the PSF licence.")
        if images.skipped:
            self._say(f"left out as damaged: {len(images.skipped)} ({', '.join(images.skipped)})")
        every = sum(p.numel() for p in self.model.parameters())
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        where = f"{self.ranks.device}, {self.ranks}" if self.ranks.kind else self.ranks.device
        size = f"{every:,} parameters, {trained:,} trained"
        self._say(f"{config.model}: {size}; {config.precision} on {where}")
        if progress.epochs or progress.batch:
            self._say(f"Resuming in {self._place()}.")

    def _place(self) -> str:
        return f"epoch {len(self.progress.epochs) + 1} after {self.progress.batch} batches"

    def _summarise(self, peak_bytes: int) -> None:
        epochs = self.progress.epochs
        run_folder.draw_curves(self.out, epochs)
        seconds = sum(epoch.seconds for epoch in epochs)  # before and after a stop
        rate = sum(epoch.images_per_s * epoch.seconds for epoch in epochs) / seconds
        of_one = " of a process" if self.ranks.size > 1 else ""
        self._say(
            f"Trained {plural(len(epochs), 'epoch')} in {seconds:.1f} s, {self._rate(rate)}, "
            f"peak memory {peak_bytes / 2**20:.0f} MiB{of_one}"
        )


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """The optimizer of a run, for the parameters of its model that are trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=config.lr, fused=True)  # which waits for no scaler's flag


def _require_a_match(config: RunConfig) -> None:
    """Raise `RunError` for images with a language model, a text with a classifier, and the like."""
    is_text, is_gpt = config.dataset in TEXTS, config.model in SIZES
    if is_text != is_gpt:
        fits = ", ".join(SIZES) if is_text else "a classifier of torchvision"
        what = "a text" if is_text else "images"
        raise RunError(f"{config.dataset} is {what}, and the model {config.model}: give {fits}")
    of_images, of_text = ("channels_last", "image_size", "skip_damaged"), TEXT_SETTINGS
    for name in of_images if is_text else of_text:
        if getattr(config, name):
            other = "images" if is_text else "text"
            raise RunError(f"{name.replace('_', ' ')} is for {other}, not for {config.dataset}")


def _require_no_place_of_yours(dataset: str) -> None:
    """Raise `RunError` for a data set that is nowhere unless `--data` says where."""
    if dataset in USERS_OWN:
        what = "text" if dataset in TEXTS else "folder of images"
        raise RunError(f"--dataset {dataset}: give your {what} with --data")


def load_data(
    config: RunConfig, folder: str | os.PathLike, *, augment: bool = True, download: bool = True
) -> ImageData:
    """The images or the text of a run; raises `DataError` as `load_dataset` and `load_text` do."""
    place, seed, limit = Path(folder), config.seed, config.limit
    if config.dataset in TEXTS:
        given = {name: getattr(config, name) for name in TEXT_SETTINGS}
        seeds = seed if augment else None
        return load_text(config.dataset, place, limit=limit, seed=seeds, **given)
    size = {"image_size": config.image_size, "limit": limit}
    how = {"skip_damaged": config.skip_damaged, "augment": augment, "download": download}
    return load_dataset(config.dataset, place, seed=seed, **size, **how)


def _warn_of_slow_fp16(device: torch.device) -> None:
    report = describe_device(device)
    speedup = report.speedup(Precision.FP16)
    if report.trusted and speedup < 0.5:
        slow = f"a matrix product takes {1 / speedup:.0f} times as long as in fp32 on this CPU"
    elif not report.trusted and not onednn_has_fp16():
        slow = "this CPU has no instructions for it, so that it is slow"
    else:
        return
    warnings.warn(f"fp16: {slow}; bf16 needs no more memory", AmpLabWarning, stacklevel=4)


class _StopSignals:
    """Notes the first SIGINT or SIGTERM within the block; the next ends the program as ever."""

    def __init__(self):
        self.signal = 0  # the number of the one that came
        self._noted_s = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_StopSignals":
        if threading.current_thread() is threading.main_thread():  # others cannot be asked to
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if not self.signal:
            self.signal, self._noted_s = number, time.monotonic()
        # Within a second it is the same one: a batch system sends it to torchrun and to all
        # processes, and torchrun passes it on.
        elif time.monotonic() - self._noted_s > 1:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


def _peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on an accelerator that keeps count, else of this process."""
    if backend(device).keeps_peak:
        return torch.accelerator.max_memory_allocated(device)
    import resource  # which Windows has not

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
