"""A training run that lives in a folder: its settings, metrics, checkpoint and resumption."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import numpy as np
import torch

from amp_lab.checkpoint import (
    load_checkpoint,
    random_states,
    restore_random_states,
    save_checkpoint,
)
from amp_lab.data import DATASETS, ImageData, batches, load_dataset
from amp_lab.device import describe_device, pick_device
from amp_lab.distributed.ranks import ALONE, TIMEOUT_S, Parallel, Ranks, is_lost, join
from amp_lab.errors import AmpLabWarning, CheckpointError, RunError, first_line
from amp_lab.files import write_whole
from amp_lab.precision import Precision
from amp_lab.training.loop import EpochMetrics, Progress, fit
from amp_lab.training.models import build_model

CONFIG, METRICS, CHECKPOINT, SHARDS = "config.json", "metrics.csv", "checkpoint.pt", "shards"
_SEED_STRIDE = 0x9E3779B97F4A7C15  # apart from the seeds that anyone would give beside another


@dataclass(frozen=True)
class RunConfig:
    """What decides the result of a run; with the same torch, threads and device, bit for bit.

    Raises `RunError` for a value that makes no sense.
    """

    dataset: str = "digits"
    model: str = "mobilenet_v2"
    precision: str = "fp32"
    batch_size: int = 64
    """Images in a batch, of all processes together; the last batch of an epoch is left out if it
    would be smaller."""
    epochs: int = 15
    lr: float = 2e-3
    """The highest learning rate of the one-cycle schedule."""
    seed: int = 0
    """Of the initial weights, the order of the images, the augmentation and dropout."""
    image_size: int | None = None
    """Height and width in pixels; None: the data set's own."""
    limit: int | None = None
    """Train on at most so many images."""
    accumulate: int = 1
    """Batches for one step of the optimizer."""
    clip_norm: float | None = None
    """Largest norm of the gradients of a step."""
    pretrained: bool = False
    freeze: bool = False
    channels_last: bool = False
    compile: bool = False
    skip_damaged: bool = False
    """Leave out images that cannot be decoded, instead of refusing to start."""

    def __post_init__(self):
        if self.dataset not in DATASETS:
            raise RunError(f"no data set {self.dataset!r}; there are {', '.join(DATASETS)}")
        if self.precision not in list(Precision):
            raise RunError(f"no precision {self.precision!r}; there are {', '.join(Precision)}")
        object.__setattr__(self, "precision", str(self.precision))  # JSON and checkpoints take text
        for name in ("batch_size", "epochs", "image_size", "limit", "accumulate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RunError(f"{name.replace('_', ' ')} must be at least 1, not {value}")
        for name in ("lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise RunError(f"{name.replace('_', ' ')} must be a positive number, not {value}")
        if not 0 <= self.seed < 2**63:
            raise RunError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")


def train(
    config: RunConfig | dict,
    out: str | os.PathLike,
    *,
    resume: bool = False,
    data: str | os.PathLike = "data",
    device: str | None = None,
    workers: int | None = None,
    checkpoint_every: int | None = None,
    parallel: Parallel | str | None = None,
    reduce_dtype: str = "fp32",
    timeout_s: float = TIMEOUT_S,
    say: Callable[[str], None] = print,
) -> signal.Signals | None:
    """Train as `config` says, in the folder `out`.

    Returns None if the run was finished, and else the signal that stopped it, SIGINT or SIGTERM:
    then the state was saved, and `resume` goes on from it. `config` may be a dict of some of the
    settings; a run that is resumed takes the rest from the folder, and starts from the beginning if
    the folder holds no run yet. For the same torch, device and number of threads, a run that was
    killed at any moment and resumed ends bitwise equal to one that was not, on a CPU.

    Into the folder go config.json, metrics.csv (a row per epoch), checkpoint.pt (after each epoch,
    and each `checkpoint_every` steps of the optimizer), loss.png and accuracy.png. `workers`
    processes load the images (None: as many as are of use). `say` gets what is to be told, by line.

    With `parallel`, "ddp" or "fsdp", this is one of several processes that torchrun started, and
    each does its share of every batch; see `amp_lab.parallel.join` for `reduce_dtype` and
    `timeout_s`. Rank 0 alone writes and says anything, but for the shards of FSDP, which all write,
    into folders that checkpoint.pt names. A run may go on in another number of processes, or in
    another way; its result then is another one. Where torchrun starts all anew because one was
    lost, the run goes on by itself.

    Raises `RunError`, `DataError`, `DeviceError`, `CheckpointError` or `ParallelError` with one
    line that says why the run cannot start or go on.
    """
    with join(
        parallel, pick_device(device), reduce_dtype=reduce_dtype, timeout_s=timeout_s
    ) as ranks:
        settings = config if isinstance(config, dict) else dataclasses.asdict(config)
        ranks.require_same(
            settings
            | {"parallel": str(parallel), "reduce_dtype": reduce_dtype, "resume": resume}
            | {"checkpoint_every": checkpoint_every, "device": ranks.device.type}
            | {"torch": torch.__version__}
        )
        with contextlib.ExitStack() as for_the_run:
            run = _prepare(
                settings, Path(out), resume, Path(data), workers, checkpoint_every, ranks,
                say if ranks.rank == 0 else lambda line: None, for_the_run,
            )  # fmt: skip
            return run.train()


def _prepare(
    settings: dict,
    out: Path,
    resume: bool,
    data: Path,
    workers: int | None,
    checkpoint_every: int | None,
    ranks: Ranks,
    say: Callable[[str], None],
    for_the_run: contextlib.ExitStack,
) -> "_Run":
    """Check all that can be checked beforehand, and make the run, in the state that was saved."""
    config = ranks.each(lambda: _checked(settings, workers, checkpoint_every, ranks))
    ranks.first(lambda: for_the_run.enter_context(_folder_to_itself(out)))
    saved = ranks.first(lambda: _read_config(out, resume))
    if saved is not None:
        config = ranks.each(lambda: _same_config(saved, settings, out))
        ranks.each(lambda: _require_shares(config, ranks))
    images = ranks.each(
        lambda: load_dataset(
            config.dataset,
            data,
            image_size=config.image_size,
            limit=config.limit,
            seed=config.seed,
            skip_damaged=config.skip_damaged,
        )
    )
    ranks.require_same({"images": images.fingerprint})
    ranks.first(lambda: _require_images(images, config, ranks, saved, data, out))
    run = _Run(config, images, out, ranks, _workers(workers, config), checkpoint_every, say)
    environment = _environment(ranks)
    if saved is None:
        ranks.first(lambda: _write_config(config, images, environment, out))
    elif saved["environment"] != environment:
        say(f"Started with {saved['environment']}; goes on with {environment}:")
        say("the result may differ.")
    if ranks.first((out / CHECKPOINT).exists):
        run.restore()
    elif resume or saved is not None:
        say(f"Nothing was saved in {out} yet: starting from the beginning.")
    return run


def _checked(
    settings: dict, workers: int | None, checkpoint_every: int | None, ranks: Ranks
) -> RunConfig:
    if checkpoint_every is not None and checkpoint_every < 1:
        raise RunError(f"checkpoint every {checkpoint_every} steps: must be at least 1")
    if workers is not None and workers < 0:
        raise RunError(f"workers must be at least 0, not {workers}")
    config = RunConfig(**settings)
    _require_shares(config, ranks)
    return config


def _require_images(
    images: ImageData, config: RunConfig, ranks: Ranks, saved: dict | None, data: Path, out: Path
) -> None:
    if saved is not None and saved["images"] != images.fingerprint:
        raise RunError(f"{data}: not the images that the run in {out} was started with")
    if config.batch_size > len(images.train):
        raise RunError(
            f"batch size {config.batch_size} is larger than the {len(images.train)} images"
        )
    if ranks.size > len(images.test):
        raise RunError(f"{len(images.test)} test images are too few for {ranks.size} processes")


def _require_shares(config: RunConfig, ranks: Ranks) -> None:
    if config.batch_size % ranks.size:
        raise RunError(
            f"batch size {config.batch_size} cannot be shared out to {ranks.size} processes: "
            f"give a multiple of {ranks.size}"
        )


def export(out: str | os.PathLike, file: str | os.PathLike) -> None:
    """Write the checkpoint of the run in the folder `out`, sharded or not, as one file.

    It is then what a run in one process would have saved, for `load_checkpoint` or `torch.load`.
    Raises `CheckpointError` if there is none, or it is damaged, or the file cannot be written.
    """
    out = Path(out)
    state = load_checkpoint(out / CHECKPOINT)
    if "ranks" not in state:
        raise CheckpointError(f"{out / CHECKPOINT}: not of a run")
    shards = state.pop("shards", None)
    if shards is not None:
        from amp_lab.checkpoint.shards import load_shards

        config = RunConfig(**state["config"])
        model = build_model(config.model, state["classes"], freeze=config.freeze)
        optimizer = _optimizer(model, config)
        load_shards(out / shards["folder"], shards["files"], model, optimizer, ALONE)
        state |= {"model": model, "optimizer": optimizer}
    save_checkpoint(file, **state)


def _optimizer(model: torch.nn.Module, config: RunConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=config.lr, fused=True
    )


class _Run:
    """All that changes while a run is trained."""

    def __init__(
        self,
        config: RunConfig,
        images: ImageData,
        out: Path,
        ranks: Ranks,
        workers: int,
        checkpoint_every: int | None,
        say: Callable[[str], None],
    ):
        self.config, self.images, self.out, self.ranks = config, images, out, ranks
        self.device = device = ranks.device
        self.workers, self.checkpoint_every, self.say = workers, checkpoint_every, say
        self.precision = Precision(config.precision)
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        torch.manual_seed(config.seed)
        self.model = ranks.each(
            lambda: build_model(
                config.model,
                len(images.classes),
                pretrained=config.pretrained,
                freeze=config.freeze,
            )
        )
        if ranks.rank > 0:  # the same weights everywhere, but dropout of one's own
            torch.manual_seed((config.seed + ranks.rank * _SEED_STRIDE) % 2**63)
        if config.channels_last and ranks.kind is Parallel.DDP:  # whose buckets keep the format
            self.model.to(memory_format=torch.channels_last)
        self.trained = ranks.wrap(self.model, self.precision)
        if config.compile:
            self.trained.compile()
        self.optimizer = _optimizer(self.model, config)
        steps = math.ceil(len(images.train) // config.batch_size / config.accumulate)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=config.lr, total_steps=steps * config.epochs
        )
        self.scaler = self.precision.grad_scaler(device.type)
        self.progress = Progress()
        self.steps = 0  # of the optimizer, in this process
        if self.precision is Precision.FP16 and device.type == "cpu":
            _warn_of_slow_fp16(device)

    def restore(self) -> None:
        path, ranks = self.out / CHECKPOINT, self.ranks
        state = ranks.first(lambda: self._load(path))
        ranks.each(lambda: self._fill(state, path))

    def _fill(self, state: dict, path: Path) -> None:
        ranks = self.ranks
        try:
            if "shards" in state:
                from amp_lab.checkpoint.shards import load_shards  # takes a second to load

                shards = state["shards"]
                load_shards(
                    self.out / shards["folder"], shards["files"], self.model, self.optimizer, ranks
                )
            elif ranks.kind is Parallel.FSDP:
                from amp_lab.checkpoint.shards import load_whole

                load_whole(state["model"], state["optimizer"], self.model, self.optimizer)
            else:
                self.model.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.scaler.load_state_dict(state["scaler"])
            self._restore_own(state["ranks"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            if is_lost(error):
                raise
            raise CheckpointError(f"{path}: does not fit this run ({first_line(error)})") from error

    def _load(self, path: Path) -> dict:
        state = load_checkpoint(path)
        if state.get("config") != dataclasses.asdict(self.config):
            raise CheckpointError(f"{path}: of another run than {self.out / CONFIG} describes")
        return state

    def _restore_own(self, states: list[dict]) -> None:
        """What each rank has for itself; another number of ranks shares it out anew."""
        rank, size = self.ranks.rank, self.ranks.size
        if rank < len(states):
            restore_random_states(states[rank]["random"], self.device)
        progress = [Progress.from_state_dict(state["progress"]) for state in states]
        if size == len(states):
            self.progress = progress[rank]
            return
        self.progress = progress[0]
        self.progress.samples = sum(p.samples for p in progress) // size
        self.progress.loss_sum = sum(p.loss_sum for p in progress) * (rank == 0)
        self.progress.correct = sum(p.correct for p in progress) * (rank == 0)

    def save(self) -> None:
        ranks = self.ranks
        ranks.share_buffers(self.model)
        state = {
            "config": dataclasses.asdict(self.config),
            "classes": len(self.images.classes),
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "ranks": ranks.gather(
                {"progress": self.progress.state_dict(), "random": random_states(self.device)}
            ),
        }
        if ranks.kind is Parallel.FSDP:
            from amp_lab.checkpoint.shards import save_shards

            name = f"{SHARDS}-{len(self.progress.epochs)}-{self.progress.batch}"
            files = save_shards(self.out / name, self.model, self.optimizer, ranks)
            state["shards"] = {"folder": name, "files": files}
        else:
            state |= {"model": self.model, "optimizer": self.optimizer}
        ranks.first(lambda: save_checkpoint(self.out / CHECKPOINT, **state))
        ranks.first(lambda: _remove_shards(self.out, state.get("shards", {}).get("folder")))

    def train(self) -> signal.Signals | None:
        config, progress, ranks = self.config, self.progress, self.ranks
        self._describe()
        ranks.first(lambda: _write_metrics(progress.epochs, self.out))
        stopped_by = None
        with _Signals() as stop, self._lone_images_refused(), warnings.catch_warnings():
            # None of torchvision's models writes into what a block of it returns.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")

            def after_step(_: Progress) -> bool:
                nonlocal stopped_by
                self.steps += 1
                # A signal to one rank stops all, at the same step.
                stopped_by = ranks.largest_before(stop.signal or 0)
                due = self.checkpoint_every and self.steps % self.checkpoint_every == 0
                if due or stopped_by:
                    self.save()
                return bool(stopped_by)

            def after_epoch(metrics: EpochMetrics) -> None:
                ranks.first(lambda: _append_metrics(metrics, self.out))
                self.save()
                self.say(_line(metrics))

            fit(
                self.trained,
                self._train_batches,
                test_batches=lambda: batches(
                    self.images.test,
                    config.batch_size,
                    share=(ranks.rank, ranks.size),
                    workers=self.workers,
                    device=self.device,
                ),
                optimizer=self.optimizer,
                precision=self.precision,
                device=self.device,
                epochs=config.epochs,
                scaler=self.scaler,
                scheduler=self.scheduler,
                accumulate=config.accumulate,
                clip_norm=config.clip_norm,
                channels_last=config.channels_last,
                progress=progress,
                ranks=ranks,
                after_step=after_step,
                after_epoch=after_epoch,
            )
        if len(progress.epochs) < config.epochs:
            self.say(
                f"Stopped in epoch {len(progress.epochs) + 1} after {progress.batch} batches; "
                "saved: --resume goes on from there."
            )
            return signal.Signals(stopped_by)
        peak = max(ranks.gather(_peak_memory(self.device)))
        ranks.first(lambda: self._summarise(peak))
        return None

    @contextlib.contextmanager
    def _lone_images_refused(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            if "Expected more than 1 value per channel" not in str(error):
                raise
            self.ranks.first(self._refuse_lone_images)

    def _refuse_lone_images(self) -> None:
        size = self.config.batch_size // self.ranks.size
        raise RunError(
            f"batch norm has {size} image to normalise in a process: give a larger batch size"
        )

    def _train_batches(self, epoch: int, batch: int):
        return batches(
            self.images.train,
            self.config.batch_size,
            epoch=epoch,
            seed=self.config.seed,
            start=batch,
            drop_last=True,
            share=(self.ranks.rank, self.ranks.size),
            workers=self.workers,
            device=self.device,
        )

    def _describe(self) -> None:
        config, images = self.config, self.images
        kind = " (generated stand-in)" if images.stand_in else ""
        self.say(
            f"{images.name}{kind}: {len(images.train)} training and {len(images.test)} test images "
            f"of {images.image_size}x{images.image_size}, {len(images.classes)} classes"
        )
        if images.skipped:
            self.say(f"left out as damaged: {len(images.skipped)} ({', '.join(images.skipped)})")
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        self.say(
            f"{config.model}: {sum(n for n, _ in sizes):,} parameters, "
            f"{sum(n for n, trained in sizes if trained):,} trained; "
            f"{config.precision} on {self.device}" + (f", {self.ranks}" if self.ranks.kind else "")
        )
        if self.progress.epochs or self.progress.batch:
            self.say(
                f"Resuming in epoch {len(self.progress.epochs) + 1} after "
                f"{self.progress.batch} batches."
            )

    def _summarise(self, peak_bytes: int) -> None:
        epochs = self.progress.epochs
        from amp_lab import plots  # matplotlib takes a second to load

        for what in ("loss", "accuracy"):
            plots.save_training_curves(
                self.out / f"{what}.png",
                {
                    part: [getattr(e, f"{part}_{what}") for e in epochs]
                    for part in ("train", "test")
                },
                what,
            )
        seconds = sum(e.seconds for e in epochs)  # before and after a stop
        rate = sum(e.images_per_s * e.seconds for e in epochs) / seconds
        self.say(
            f"Trained {len(epochs)} epochs in {seconds:.1f} s, {rate:.0f} images/s, "
            f"peak memory {peak_bytes / 2**20:.0f} MiB"
            + (" of a process" if self.ranks.size > 1 else "")
        )


def _workers(asked: int | None, config: RunConfig) -> int:
    """Processes that load images: none where they wait in memory, else one per core up to 8."""
    if asked is not None:
        return asked
    return min(8, os.cpu_count() or 1) if config.dataset == "caltech256" else 0


def _line(m: EpochMetrics) -> str:
    """An epoch in a line."""
    return (
        f"epoch {m.epoch:3d}  loss {m.train_loss:.4f}  accuracy {m.train_accuracy:.2%}  "
        f"test loss {m.test_loss:.4f}  test accuracy {m.test_accuracy:.2%}  "
        f"{m.images_per_s:.0f} images/s"
    )


def _peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on an accelerator that keeps count, else of this process."""
    if device.type not in ("cpu", "mps"):
        return torch.accelerator.max_memory_allocated(device)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def _folder_to_itself(out: Path) -> Iterator[None]:
    """Make the folder; keep any other run out of it for the block, which no kill -9 outlasts."""
    lock = filelock.FileLock(out / ".lock")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise RunError(f"{out}: another run is at work in this folder") from None
    except OSError as error:
        raise RunError(f"{out}: nothing can be written there ({error.strerror})") from error
    try:
        yield
    finally:
        lock.release()


def _read_config(out: Path, resume: bool) -> dict | None:
    """What is in the folder's config.json, or None if there is no run yet."""
    path = out / CONFIG
    if not path.exists():
        if (out / CHECKPOINT).exists():
            raise RunError(f"{out}: has a checkpoint but no {CONFIG}; choose another folder")
        return None
    try:
        saved = json.loads(path.read_text())
        found = {"config": RunConfig(**saved["config"])} | {
            key: saved[key] for key in ("images", "environment")
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path}: not the settings of a run ({error})") from error
    # A torchrun that has lost a process starts the same command again.
    if not resume and (_starter() is None or saved.get("started_by") != _starter()):
        raise RunError(f"{out}: holds a run already; --resume goes on with it, or choose another")
    return found


def _same_config(saved: dict, settings: dict, out: Path) -> RunConfig:
    """The settings of the saved run; whatever is asked for now must be the same."""
    for name, value in settings.items():
        before = getattr(saved["config"], name)
        if value != before:
            raise RunError(
                f"{out}: the run was started with {name.replace('_', ' ')} {before}, and cannot go "
                f"on with {value}"
            )
    return saved["config"]


def _write_config(config: RunConfig, images: ImageData, environment: str, out: Path) -> None:
    content = {
        "config": dataclasses.asdict(config),
        "images": images.fingerprint,
        "environment": environment,
        "started_by": _starter(),
    }
    _write(out / CONFIG, json.dumps(content, indent=2) + "\n")


def _environment(ranks: Ranks) -> str:
    """What else a result depends on, if only in its last bits."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {ranks}"


def _starter() -> str | None:
    """What tells one torchrun, on the machine of rank 0, from another; None without."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return run and f"{run} {socket.gethostname()} {os.getppid()}"


def _remove_shards(out: Path, but: str | None) -> None:
    """Remove the folders of checkpoints that another has replaced."""
    for folder in out.glob(f"{SHARDS}-*-*"):
        if folder.name != but and re.fullmatch(rf"{SHARDS}-\d+-\d+", folder.name):
            shutil.rmtree(folder, ignore_errors=True)  # one that cannot go does no harm


def _write_metrics(epochs: list[EpochMetrics], out: Path) -> None:
    """The file anew, with the epochs that the checkpoint knows of: a kill may have come between."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(field.name for field in dataclasses.fields(EpochMetrics))
    writer.writerows(dataclasses.astuple(epoch) for epoch in epochs)
    _write(out / METRICS, text.getvalue())


def _append_metrics(metrics: EpochMetrics, out: Path) -> None:
    try:
        with open(out / METRICS, "a", newline="") as file:
            csv.writer(file).writerow(dataclasses.astuple(metrics))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"{out / METRICS}: cannot be written ({error.strerror})") from error


def _write(path: Path, text: str) -> None:
    """Write a small file so that it is never there in part."""
    try:
        write_whole(path, [text.encode()])
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


class _Signals:
    """Notes the first SIGINT or SIGTERM within the block; the next ends the program as ever.

    One that comes within a second is the same: a batch system sends it to torchrun and to all
    processes, and torchrun passes it on.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._noted_s = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():  # others cannot be asked to
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._noted_s = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._noted_s > 1:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


def _warn_of_slow_fp16(device: torch.device) -> None:
    speedup = describe_device(device).speedup(Precision.FP16)
    if speedup < 0.5:
        warnings.warn(
            f"fp16: a matrix product takes {1 / speedup:.0f} times as long as in fp32 on this CPU; "
            "bf16 needs no more memory",
            AmpLabWarning,
            stacklevel=4,
        )
