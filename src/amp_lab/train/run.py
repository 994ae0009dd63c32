"""A training run that saves its state in a folder, and can be resumed from this folder."""

import math
import os
import random
import signal
import warnings
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from amp_lab.core.backends import backend
from amp_lab.core.cpu import onednn_has_fp16
from amp_lab.core.device import describe_device, pick_device
from amp_lab.core.device_facts import peak_bytes
from amp_lab.core.errors import AmpLabWarning, RunError
from amp_lab.core.precision import Precision
from amp_lab.core.report import plural
from amp_lab.models.build import build_model, require_images_that_fit
from amp_lab.parallel.ranks import Ranks, require_same
from amp_lab.train import run_folder, run_state
from amp_lab.train.data import SampleSet, batches
from amp_lab.train.data.tokens import BPE
from amp_lab.train.distributed.process_group import join
from amp_lab.train.loop import Batches, EpochMetrics, Progress, fit
from amp_lab.train.registry import DATASETS, Source
from amp_lab.train.run_data import load_data, locate_data, require_match
from amp_lab.train.stop_signals import StopSignals
from amp_lab.train.train_options import ALL_SETTINGS, RunConfig, RunOptions


def train(
    config: RunConfig,
    options: RunOptions,
    *,
    given: Collection[str] = ALL_SETTINGS,
    say: Callable[[str], None] = print,
) -> signal.Signals | None:
    """Train as `config` says, in the folder `options.out`.

    Returns None if the run was finished, or else the signal that stopped the run, after saving its
    state. `given` has the names of the settings that the user gave. A resumed run takes all other
    settings from its folder. On a CPU, a run that was killed at any moment and resumed ends bitwise
    equal to a run without interruption, with the same torch and number of threads. `say` is called
    with each line to report. The folder gets config.json, metrics.csv, checkpoint.pt, loss.png and
    accuracy.png.

    With `parallel`, "ddp" or "fsdp", torchrun has started this process and others, and each trains
    on its share of every batch. A run may be resumed with another number of processes or another
    `parallel`, but then the result differs. If torchrun restarts the processes because one was
    lost, the run resumes automatically.

    Raises `RunError`, `DataError`, `DeviceError`, `CheckpointError` or `ParallelError`. The message
    is one line with the reason why the run cannot start or resume.
    """
    group = join(
        options.parallel,
        pick_device(options.device),
        reduce_dtype=options.reduce_dtype,
        timeout_s=options.timeout,
    )
    with group as ranks, ExitStack() as until_end:
        return Run(config, given, options, ranks, until_end, say).train()


_SAME_ON_ALL_RANKS = ("parallel", "reduce_dtype", "resume", "checkpoint_every")  # of the options
_MAX_EXPONENT = 700  # e^700 is a float, and e^710 is not


class Run:
    """A run on this rank. `Run(…)` loads data and model, and the saved state if there is one.

    `ranks.first` runs a function on rank 0 and returns its value on all ranks. `ranks.each` runs it
    on every rank. If one rank fails, both raise on all ranks, so that no rank waits for another.
    `ranks.gather` returns the values of all ranks. `given` has the names of the settings that the
    user gave. Rank 0 locks the folder, and releases the lock when `until_end` is closed.
    """

    def __init__(
        self,
        config: RunConfig,
        given: Collection[str],
        options: RunOptions,
        ranks: Ranks,
        until_end: ExitStack,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.options = options
        self.ranks = ranks
        self.out = Path(options.out)
        self.progress = Progress()
        self._print = say
        self._steps = 0  # of the optimizer, in this process
        self._stopped_by = 0  # number of the signal that any rank got
        # 1. Rank 0 compares the commands of the ranks, and locks the folder.
        commands = ranks.gather(self._command(config, given))
        plan = ranks.first(lambda: self._plan(config, given, commands, until_end))
        self.config, self._saved = plan  # `_saved`: the run to resume; None for a new run
        # 2. Each rank loads the data and builds the model; then all join their models.
        ranks.each(self._build)  # sets `data` and `model`
        self._wrap()  # sets `wrapped_model` and `parts`
        # 3. Rank 0 checks that all have the same data, and loads the checkpoint if there is one.
        fingerprints = ranks.gather({"data": self.data.fingerprint})
        state = ranks.first(lambda: self._start(fingerprints))
        if state is not None:
            self._restore(state)

    def _say(self, line: str) -> None:
        """Report a line, on rank 0 only."""
        if self.ranks.rank == 0:
            self._print(line)

    def _command(self, config: RunConfig, given: Collection[str]) -> dict:
        """The settings, options and versions that must be the same on all ranks, by name."""
        command: dict[str, object] = {name: getattr(config, name) for name in given}
        for name in _SAME_ON_ALL_RANKS:
            command[name] = getattr(self.options, name)
        command["device"] = self.ranks.device.type
        command["torch"] = torch.__version__
        return command

    def _plan(
        self,
        config: RunConfig,
        given: Collection[str],
        commands: list[dict],
        until_end: ExitStack,
    ) -> tuple[RunConfig, run_folder.SavedRun | None]:
        """Lock the folder, and check all that can be checked before data and model are loaded.

        Returns the settings of the run, and the run in the folder, None if it is new. `commands`
        has the `_command` of each rank. Raises `RunError` or `ParallelError`. Called on rank 0.
        """
        require_same(commands)
        config_file = self.out / run_folder.CONFIG
        if self.options.resume and not given and not config_file.exists():
            raise RunError(
                f"{self.out}: there is no run to resume; leave out --resume to start one"
            )
        if config.tokenizer not in (None, BPE):
            # A file: an absolute path is found when the run is resumed from another folder too.
            config = replace(config, tokenizer=os.path.abspath(config.tokenizer))
        until_end.enter_context(run_folder.lock(self.out))  # released when `until_end` is closed
        saved = run_folder.read_saved(self.out, config, given, resume=self.options.resume)
        if saved is not None:
            # `epochs` is the only setting that may change.
            epochs = config.epochs if "epochs" in given else saved.config.epochs
            config = replace(saved.config, epochs=epochs)
        processes = len(commands)
        if config.batch_size % processes:
            problem = f"batch size {config.batch_size} cannot be divided by {processes} processes"
            raise RunError(f"{problem}: give a multiple of {processes}")
        return config, saved

    def _build(self) -> None:
        """Load the data set into `data`, seed the generators, and build `model`.

        Called on every rank. Raises `RunError` or `DataError` if data and settings do not fit.
        """
        config = self.config
        require_match(config)
        self._data_path = locate_data(config, self.options.data, self._saved, self.out)
        self.data = load_data(config, self._data_path)
        self._check_data()
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)  # NumPy takes no larger seed
        torch.manual_seed(config.seed)
        self.model = build_model(
            config.model,
            self.data.num_classes,
            pretrained=config.pretrained,
            freeze=config.freeze,
        )
        if not self.data.is_text:
            # Batch norm refuses a batch of one image, but takes any larger one.
            count = min(2, config.batch_size // self.ranks.size)
            require_images_that_fit(self.model, count, self.data.image_size)
        if config.precision == Precision.FP16 and backend(self.ranks.device).is_host:
            _warn_of_slow_fp16(self.ranks.device)

    def _check_data(self) -> None:
        """Raise `RunError` if the run was started with other data, or there are too few samples."""
        data = self.data
        if self._saved is not None and self._saved.fingerprint != data.fingerprint:
            # A text may be the same and cut into other tokens, as by a changed tokenizer.
            kind = "text or the tokens" if data.is_text else "images"
            problem = f"the {kind} differ from those of the run in {self.out}"
            raise RunError(f"{self._data_path}: {problem}; resume with the same data")
        size = self.config.batch_size
        if size > len(data.train):
            samples = f"the training set, {len(data.train)} {data.unit}"
            raise RunError(f"batch size {size} is larger than {samples}: give a smaller one")
        if self.ranks.size > len(data.test):
            problem = f"{len(data.test)} test {data.unit} are too few"
            raise RunError(f"{problem} for {self.ranks.size} processes: start fewer")

    def _wrap(self) -> None:
        """Move the model to the device, and make `wrapped_model`, which all ranks train together.

        Also makes optimizer, scheduler and scaler, and `parts` of them and the model.
        """
        config = self.config
        ranks = self.ranks
        precision = Precision(config.precision)
        if ranks.rank > 0:
            # All ranks have built the same weights. From here on, each rank draws other dropout
            # masks. The factor, 2^64 divided by the golden ratio, puts the seeds far apart.
            torch.manual_seed((config.seed + ranks.rank * 0x9E3779B97F4A7C15) % 2**63)
        if config.channels_last:  # before DDP, whose buckets copy the layout of the weights
            ranks.set_memory_format(self.model, torch.channels_last)
        self.wrapped_model = ranks.wrap(self.model, precision)
        if config.compile:
            self.wrapped_model.compile()
        optimizer = run_state.make_optimizer(self.model, config)
        steps = config.epochs * self._steps_for(self._batches_per_epoch)
        self.parts = run_state.TrainingObjects(
            model=self.model,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, steps),
            scaler=precision.grad_scaler(ranks.device.type),
        )

    @property
    def _batches_per_epoch(self) -> int:
        return len(self.data.train) // self.config.batch_size  # a smaller last one is dropped

    def _steps_for(self, batches: int) -> int:
        """Optimizer steps for the first `batches` batches of an epoch."""
        return math.ceil(batches / self.config.accumulate)  # the last step may have fewer batches

    def _start(self, fingerprints: list[dict]) -> dict | None:
        """Write config.json, and load the checkpoint; None if the run starts from the beginning.

        `fingerprints` has a dict of each rank, with the fingerprint of its data. Called on rank 0.
        """
        require_same(fingerprints)
        environment = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {self.ranks}"
        self._write_config(environment)
        saved = self._saved
        if saved is not None and saved.environment != environment:
            self._say(f"The run was started with {saved.environment}.")
            self._say(f"It resumes with {environment}, so the result may differ.")
        if saved is not None and saved.config != self.config:
            self._say(f"The learning rate now follows a schedule of {self.config.epochs} epochs.")
        state = run_state.load_run(self.out, self.config)
        has_begun = self.options.resume or saved is not None
        if state is None and has_begun:
            self._say(f"{self.out} has no checkpoint yet: the run starts from the beginning.")
        return state

    def _restore(self, state: dict) -> None:
        """Restore `parts` and `progress` from the content of a checkpoint, on every rank."""
        # Restoring the scheduler sets the length of its schedule to the saved one. Put the new
        # length back, since `epochs` may have been increased.
        scheduler = self.parts.scheduler
        total_steps = scheduler.total_steps
        phases = scheduler._schedule_phases
        self.progress = self.ranks.each(
            lambda: run_state.restore_run(
                self.out, state, self.ranks, self.parts, self._restore_progress
            )
        )
        scheduler.total_steps = total_steps
        scheduler._schedule_phases = phases

    def _restore_progress(self, saved: dict) -> Progress:
        """The progress from its state dict, `saved`.

        Raises `TypeError` or `ValueError` if it is damaged, or does not fit settings and scheduler.
        """
        progress = Progress.from_state_dict(saved)
        config = self.config
        batches = self._batches_per_epoch
        epochs = len(progress.epochs)
        description = f"{epochs} epochs and {progress.batch} batches"
        if epochs > config.epochs or progress.batch > batches:
            raise ValueError(
                f"{description}, but the run has {config.epochs} epochs of {batches} batches"
            )
        if (progress.samples > 0) != (progress.batch > 0):
            raise ValueError(f"{progress.samples} samples in {progress.batch} batches")
        steps = epochs * self._steps_for(batches) + self._steps_for(progress.batch)
        if steps != self.parts.scheduler.last_epoch:  # which counts steps, despite its name
            raise ValueError(f"{description}, which do not match the number of steps")
        return progress

    def _write_config(self, environment: str) -> None:
        """Write config.json for a new run, or if `epochs` or the path of the data has changed."""
        data = None
        if DATASETS[self.config.dataset].source is not Source.LIBRARY:
            data = os.path.abspath(self._data_path)
        if self._saved is None:
            run = run_folder.SavedRun(self.config, self.data.fingerprint, environment, data)
        else:
            run = replace(self._saved, config=self.config, data=data)
        if run != self._saved:
            run_folder.write_config(self.out, run)

    def save(self) -> None:
        """Write the checkpoint; all ranks must call this together."""
        description = {"config": asdict(self.config), "classes": self.data.num_classes}
        if self.data.tokens is not None:
            description |= self.data.tokens.saved  # for `saved_tokens` to read
        progress = self.progress.state_dict()
        run_state.save_run(self.out, self.ranks, self.parts, progress, description)

    def train(self) -> signal.Signals | None:
        """Train to the end and return None; or return the signal that stopped the run."""
        self._describe()
        # After a kill metrics.csv may have a row for an epoch that the checkpoint does not have.
        self._write_metrics()
        with StopSignals() as stop, warnings.catch_warnings():
            # FSDP2 warns that code may write into such a tensor, which torchvision's models do not.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            self._fit(stop)  # sets `_stopped_by` if a signal ends it
        if len(self.progress.epochs) < self.config.epochs:
            self._say(f"Stopped in {self._position()}, and saved. Continue with --resume.")
            return signal.Signals(self._stopped_by)
        peak = max(self.ranks.gather(peak_bytes(self.ranks.device)))
        self.ranks.first(lambda: self._summarise(peak))
        return None

    def _fit(self, stop: StopSignals) -> None:
        """Call `fit` with the settings of the run; it returns early if any rank gets a signal."""
        config = self.config
        data = self.data
        ranks = self.ranks
        share = (ranks.rank, ranks.size)

        def train_batches(epoch: int, batch: int) -> Batches:
            return batches(
                data.train,
                config.batch_size,
                epoch=epoch,
                seed=config.seed,
                start=batch,
                drop_last=True,
                share=share,
                workers=self._workers_for(data.train),
                device=ranks.device,
            )

        def test_batches() -> Batches:
            return batches(
                data.test,
                config.batch_size,
                share=share,
                workers=self._workers_for(data.test),
                device=ranks.device,
            )

        def after_step(_: Progress) -> bool:
            return self._after_step(stop.signal)

        fit(
            self.wrapped_model,
            train_batches,
            epochs=config.epochs,
            test_batches=test_batches,
            precision=config.precision,
            device=ranks.device,
            optimizer=self.parts.optimizer,
            scheduler=self.parts.scheduler,
            scaler=self.parts.scaler,
            accumulate=config.accumulate,
            clip_norm=config.clip_norm,
            channels_last=config.channels_last,
            ranks=ranks,
            progress=self.progress,
            after_step=after_step,
            after_epoch=self._after_epoch,
        )

    def _write_metrics(self) -> None:
        """Write metrics.csv, on rank 0; all ranks must call this together."""
        self.ranks.first(lambda: run_folder.write_metrics(self.out, self.progress.epochs))

    def _after_step(self, own_signal: int) -> bool:
        """Save a checkpoint if one is due or a signal came; return whether to stop for a signal.

        `own_signal` is the number of the signal that this process got, or 0.
        """
        self._steps += 1
        # The ranks exchange their signals, so that all stop at the same step, one after the signal.
        self._stopped_by = self.ranks.largest_before(own_signal)
        every = self.options.checkpoint_every
        is_due = every is not None and self._steps % every == 0
        if self._stopped_by or is_due:
            self.save()
        return bool(self._stopped_by)

    def _after_epoch(self, metrics: EpochMetrics) -> None:
        """Write metrics and checkpoint, and report the epoch."""
        self._write_metrics()  # before the checkpoint that counts the epoch as done
        self.save()
        self._say(
            f"epoch {metrics.epoch:3d}  loss {metrics.train_loss:.4f}  "
            f"accuracy {metrics.train_accuracy:.2%}  test loss {metrics.test_loss:.4f}  "
            f"test accuracy {metrics.test_accuracy:.2%}  {self._rate(metrics.images_per_s)}"
        )
        nonfinite_losses = [not math.isfinite(epoch.train_loss) for epoch in self.progress.epochs]
        if sum(nonfinite_losses) == 1:  # only after the first such epoch
            self._say("The loss is not finite: try a lower --lr, or find the op (find_nonfinite).")

    def _rate(self, per_second: float) -> str:
        """The text for a number of samples per second: ``830 images/s``.

        For a text it has the perplexity of the last test as well, and the rate in tokens:
        ``perplexity 9.2  1536 tokens/s``.
        """
        if not self.data.is_text:
            return f"{per_second:.0f} images/s"
        test_loss = self.progress.epochs[-1].test_loss
        perplexity = math.exp(min(test_loss, _MAX_EXPONENT))
        tokens = per_second * self.data.sample_shape[0]
        return f"perplexity {perplexity:.4g}  {tokens:.0f} tokens/s"

    def _workers_for(self, samples: SampleSet) -> int:
        """The number of processes that load images: the option, or as many as help."""
        if self.options.workers is not None:
            return self.options.workers
        if not samples.reads_files:  # they are in memory already
            return 0
        return min(8, os.cpu_count() or 1)  # the count is None if the system does not tell it

    def _describe(self) -> None:
        """Report the data, the model, the device, and from where a run resumes."""
        config = self.config
        data = self.data
        self._say(data.summary)
        notice = DATASETS[config.dataset].notice
        if notice:
            self._say(notice)
        if data.skipped:
            self._say(f"damaged images left out: {len(data.skipped)} ({', '.join(data.skipped)})")
        counts = _describe_parameters(self.model)
        where = str(self.ranks.device)
        if self.ranks.kind is not None:
            where += f", {self.ranks}"
        self._say(f"{config.model}: {counts}; {config.precision} on {where}")
        if self.progress.epochs or self.progress.batch:
            self._say(f"Resuming in {self._position()}.")

    def _position(self) -> str:
        """How far the run has come, as a text: ``epoch 3 after 120 batches``."""
        return f"epoch {len(self.progress.epochs) + 1} after {self.progress.batch} batches"

    def _summarise(self, peak_bytes: int) -> None:
        """Draw the curves, and report time, rate and memory of the whole run; called on rank 0."""
        epochs = self.progress.epochs
        run_folder.draw_curves(self.out, epochs)
        seconds = sum(epoch.seconds for epoch in epochs)  # before and after a resume
        samples = sum(epoch.images_per_s * epoch.seconds for epoch in epochs)
        rate = samples / seconds
        memory = f"peak memory {peak_bytes / 2**20:.0f} MiB"
        if self.ranks.size > 1:
            memory += " per process"
        trained = f"Trained {plural(len(epochs), 'epoch')} in {seconds:.1f} s"
        self._say(f"{trained}, {self._rate(rate)}, {memory}")


def _describe_parameters(model: nn.Module) -> str:
    """The numbers of parameters as a text: ``2,236,682 parameters, 12,810 trained``."""
    total = 0
    trained = 0
    for parameter in model.parameters():
        total += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()
    return f"{total:,} parameters, {trained:,} trained"


def _warn_of_slow_fp16(device: torch.device) -> None:
    """Warn if fp16 is slow on this CPU: by measured rates, else because it lacks instructions."""
    report = describe_device(device)
    speedup = report.speedup(Precision.FP16)
    if report.trusted and speedup < 0.5:  # less than half the rate of fp32
        reason = f"a matmul takes {1 / speedup:.0f} times as long as in fp32"
    elif not report.trusted and not onednn_has_fp16():
        reason = "this CPU has no fp16 instructions"
    else:
        return
    message = f"fp16 is slow here: {reason}; use bf16, which needs no more memory"
    warnings.warn(message, AmpLabWarning, stacklevel=4)
