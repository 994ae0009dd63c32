"""One training step on fake tensors, and the forecast that comes of it."""

import dataclasses
import functools
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from amp_lab.backends import Backend, backend
from amp_lab.errors import AmpLabError, TraceError, first_line
from amp_lab.precision import Precision
from amp_lab.report import listed, short_name
from amp_lab.torch_versions import step_counters_on_host
from amp_lab.tracing.backward import Seeds, run_backward, seeds_of
from amp_lab.tracing.decisions import Decisions, MemoryNeeded, Replay, ValuesNeeded
from amp_lab.tracing.fake_device import (
    NEEDS_VALUES,
    ModelRun,
    autocast_on,
    checked_backend,
    needs_memory,
    on_fake_device,
    own_reason,
    remedy_for,
    require_model,
    tip_for,
)
from amp_lab.tracing.memory_result import MemoryForecast
from amp_lab.tracing.ops_seen import LOWER_DTYPES, tensors_in
from amp_lab.tracing.records import RNN_LAYERS
from amp_lab.tracing.storage_ledger import StorageLedger, StorageTrace
from amp_lab.tracing.structures import named_tensors

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,  # of matrices; what else there is has AdamW
}
"""The optimizers by name. Each is really run, on tensors without memory, to see what it needs."""

QUANTIZED = {  # bits, values in a block, bytes of a look-up table, bytes for a value in a step
    "adamw-8bit": (8, 256, 256 * 4, 8),
    "adamw-4bit": (4, 128, 16 * 4, 26),
    "adamw-fp8": (8, 256, 0, 0),
}
"""``AdamW8bit``, ``AdamW4bit`` and ``AdamWFp8`` of `torchao.optim`, which need not be there.

What a step takes is what Inductor 2.15 allocates on a CPU.
"""

_LOOPS = ("adafactor", "muon")  # over the parameters, in which the last one's temporaries live on
_MOST_RANKS = 1024
_RNN_CAVEAT = ": forecast with torch's own kernels; cuDNN or oneDNN may keep twice as much."

_MIXED_DEVICES = "to be on the same device"  # as fake tensors say it

_Traced = TypeVar("_Traced")
LossFunction = Callable[[Any], torch.Tensor]
Parameter = tuple[tuple[int, ...], torch.dtype]  # its shape and dtype


def traced_on_either(trace: Callable[[], _Traced]) -> _Traced:
    """What `trace` returns; where devices are mixed, with tensors on the CPU by default.

    Some models count on tensors made without a device being there, such as torchvision's SSD, whose
    boxes are made of them and of sizes that it holds. Raises what the first trace raises if both
    mix devices.
    """
    try:
        return trace()
    except TraceError as error:
        if _MIXED_DEVICES not in str(error):
            raise
        mixed = error
    try:
        with torch.device("cpu"):
            return trace()
    except TraceError as error:
        if _MIXED_DEVICES in str(error):
            raise mixed from mixed.__cause__
        raise


@contextmanager
def training_steps(
    model: nn.Module,
    device_type: str,
    precisions: Iterable[Precision | str],
    optimizer: str = "adam",
    loss_fn: LossFunction | None = None,
    fsdp_ranks: int = 1,
) -> Iterator[list["TrainingStep"]]:
    """The block in which a training step can be traced, one for each precision.

    With `fsdp_ranks` it is that of one of so many. Opening it takes as long as half a trace. Raises
    `TraceError` or `DeviceError` for what cannot be.
    """
    if optimizer not in (names := (*OPTIMIZERS, *QUANTIZED)):
        raise TraceError(f"optimizer {optimizer!r}: give one of {', '.join(names)}")
    if not 1 <= fsdp_ranks <= _MOST_RANKS:
        raise TraceError(f"ranks {fsdp_ranks}: give 1 to {_MOST_RANKS}")
    checked_backend(device_type)
    traced_on = "cpu" if fsdp_ranks > 1 else device_type
    with steps_on(model, traced_on, precisions) as (run, asked), torch.enable_grad():
        options = optimizer, loss_fn, fsdp_ranks
        yield [TrainingStep(run, device_type, precision, *options) for precision in asked]


@contextmanager
def steps_on(
    model: nn.Module, device_type: str, precisions: Iterable[Precision | str]
) -> Iterator[tuple[ModelRun, list[Precision]]]:
    """The block in which a model can be traced, and the precisions, which are checked.

    Raises `TraceError` or `DeviceError` for what cannot be.
    """
    asked = list(precisions)
    if not asked:
        raise TraceError("precisions is empty; give at least one")
    require_model(model)
    for precision in asked:
        if precision not in list(Precision):
            raise TraceError(f"precision {precision!r}: give one of {', '.join(Precision)}")
    checked_backend(device_type)
    with _same_every_time(), on_fake_device(model, (), {}, device_type) as run:
        yield run, [Precision(precision) for precision in asked]


@dataclass(frozen=True)
class TrainingStep:
    """What to run, all but the inputs; made by `training_steps`."""

    run: ModelRun  # its inputs are not used
    device_type: str
    precision: Precision
    optimizer: str
    loss_fn: LossFunction | None
    ranks: int = 1

    @property
    def traced_on(self) -> str:
        """The type of device whose kernels run, and on which its inputs have to be."""
        return "cpu" if self.ranks > 1 else self.device_type

    def trace(
        self, inputs: tuple, kwargs: dict[str, Any], decisions: Decisions | None = None
    ) -> "TracedStep":
        """Run the step once on fake inputs, and note every storage's coming and going.

        `decisions` are those of a real run on such inputs, if values decide its course.
        """
        return traced_on_either(lambda: self._told(inputs, kwargs, decisions))

    def _told(
        self, inputs: tuple, kwargs: dict[str, Any], decisions: Decisions | None
    ) -> "TracedStep":
        with self.run.told(decisions) as replay:
            traced = self._trace(inputs, kwargs, replay)
            replay.require_done()
        return dataclasses.replace(traced, decisions=replay.remark)

    def _trace(self, inputs: tuple, kwargs: dict[str, Any], replay: Replay) -> "TracedStep":
        run = self.run
        given = [tensor for _, tensor in named_tensors((inputs, kwargs), opened=True)]
        shapes = tuple(tuple(tensor.shape) for tensor in given)
        if self.ranks > 1:
            from amp_lab.tracing.sharded_step import trace_sharded  # FSDP2 takes a second to load

            with one_line_errors(run.model, shapes, self.device_type):
                shards, storages = trace_sharded(self, inputs, kwargs, replay)
            sharded = tuple((tuple(shard.shape), shard.dtype) for shard in shards)
            return TracedStep(self, shapes, sharded, storages)
        ledger = StorageLedger(self.device_type)
        ledger.own("weights", run.parameters.values())
        ledger.own("buffers", run.buffers.values())
        ledger.own("inputs", given)
        with (
            one_line_errors(run.model, shapes, self.device_type),
            ledger.naming_modules(run.model),
            ledger,
            # Around the backward pass too, in which activation checkpointing calls modules again.
            _reparametrize_module(run.model, run.parameters | run.buffers),
        ):
            gradients = run_backward(self._forward(ledger, inputs, kwargs))
            trained = {id(p): p for p in run.parameters.values() if id(p) in gradients}
            self._require_sizes(gradients)
            ledger.own("gradients", [gradients[key] for key in trained])
            ledger.mark("backward")
        shapes_trained = tuple((tuple(p.shape), p.dtype) for p in trained.values())
        return TracedStep(self, shapes, shapes_trained, ledger.trace(kept_at="forward"))

    def _require_sizes(self, gradients: dict[int, torch.Tensor]) -> None:
        sgd = self.optimizer == "sgd"  # as fakes, sums of sparse ones are empty, bags' on CPUs too
        bad = {key for key, g in gradients.items() if g.is_sparse and not (sgd and g._nnz())}
        if bad:
            names = listed([name for name, p in self.run.parameters.items() if id(p) in bad], 3)
            why = "values decide their size" if sgd else f"{self.optimizer} (not sgd) refuses them"
            said = f"the gradients of {names} are sparse, and {why}"
            raise TraceError(f"{said}: make the embedding with sparse=False")

    def output(self, model: nn.Module, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        """The loss, or what the model returns if there is no loss function."""
        output = model(*inputs, **kwargs)
        if self.loss_fn is None:
            return output
        loss = self.loss_fn(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = tuple(getattr(loss, "shape", ())) or type(loss).__name__
            raise TraceError(f"loss_fn must return one number, not {found}")
        return loss

    def _forward(self, ledger: StorageLedger, inputs: tuple, kwargs: dict[str, Any]) -> Seeds:
        """The forward pass: where the backward pass begins."""
        low = self.precision.dtype is not torch.float32
        hooks = torch.autograd.graph.saved_tensors_hooks(ledger.keep, lambda tensor: tensor)
        device, model = backend(self.device_type), self.run.model
        once = _CastOnce(device) if device.fused_rnn_dtype else nullcontext()
        with autocast_on(self.device_type, self.precision.dtype if low else None, enabled=low):
            with hooks, once:
                output = self.output(model, inputs, kwargs)
            ledger.mark("cached")  # the block's end clears autocast's cache
        ledger.mark("forward")
        seeds = seeds_of(output)
        if not seeds and any(p.requires_grad for p in model.parameters()):
            raise TraceError(
                f"no gradient leads from what {type(model).__name__} returns "
                f"({type(output).__name__}) to its parameters: give a loss_fn that makes a loss of "
                "it, and let the forward pass record gradients"
            )
        return seeds


@dataclass(frozen=True)
class TracedStep:
    """What a step allocated, when it ran on inputs of these shapes."""

    step: TrainingStep
    input_shapes: tuple[tuple[int, ...], ...]
    trained: tuple[Parameter, ...]  # those that got a gradient
    storages: StorageTrace
    decisions: str = ""  # what to say if it took decisions of a run on the CPU

    def forecast(self) -> MemoryForecast:
        """The forecast for this step, its optimizer included, which never ran with it."""
        step, storages, marks = self.step, self.storages, self.storages.marks
        state, work = optimizer_bytes(step.optimizer, self.trained, step.device_type)
        cached, kept, done = (storages.by_kind(marks[m]) for m in ("cached", "forward", "backward"))
        in_use, forward, backward = storages.in_use() + state, marks["forward"], marks["backward"]
        peak_at = {  # the event of each phase at which the most is in use
            "forward": int(np.argmax(in_use[:forward])),
            "backward": forward - 1 + int(np.argmax(in_use[forward - 1 : backward])),
            "optimizer": backward - 1,
        }
        phases = {name: int(in_use[event]) for name, event in peak_at.items()}
        phases["optimizer"] += work
        peak_phase = max(phases, key=phases.__getitem__)
        at_peak = storages.by_kind(peak_at[peak_phase] + 1)
        at_peak["optimizer"] += state
        at_peak["temporaries"] += work if peak_phase == "optimizer" else 0
        largest = storages.largest(peak_at[peak_phase] + 1, phases[peak_phase])
        rnns = {type(m).__name__ for m in step.run.model.modules() if isinstance(m, nn.RNNBase)}
        caveats = [f"{kind}{_RNN_CAVEAT}" for kind in sorted(rnns)]
        caveats += _caveat_of_low_weights(step.run.model, step.precision)
        if self.decisions:
            caveats.append(self.decisions)
        return MemoryForecast(
            model=type(step.run.model).__name__,
            input_shapes=self.input_shapes,
            device_type=step.device_type,
            precision=step.precision,
            optimizer_name=step.optimizer,
            weights=kept["weights"],
            buffers=kept["buffers"],
            gradients=done["gradients"],
            optimizer=state,
            activations=kept["activations"],
            cast_cache=cached["cast_cache"],
            cast_kept=kept["cast_cache"],
            phases=phases,
            at_peak=at_peak,
            caveats=tuple(caveats),
            fsdp_ranks=step.ranks,
            largest_at_peak=str(largest or ""),
        )


def _caveat_of_low_weights(model: nn.Module, precision: Precision) -> Iterator[str]:
    """What to say of a step in fp32 whose weights are in 16 bits."""
    low = {short_name(p.dtype) for p in model.parameters() if p.dtype in LOWER_DTYPES}
    if low and precision in (Precision.FP32, Precision.TF32):
        names = listed(sorted(low))
        yield f"Weights in {names} stay so: {precision} is this model without autocast."


class _CastOnce(TorchFunctionMode):
    """Casts a recurrent layer's input, states and weights once, and not anew for each step.

    So does autocast for a library that takes the weights as one flat copy, as cuDNN does
    (ATen/cudnn/AutocastRNN.cpp). torch's own kernels, which stand in for it on fake tensors, would
    cast every weight in every step.
    """

    def __init__(self, device: Backend):
        self._type, self._dtype = device.type, device.fused_rnn_dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in RNN_LAYERS or not torch.is_autocast_enabled(self._type):
            return func(*args, **kwargs)

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self._dtype) if tensor.dtype is torch.float32 else tensor

        args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        with autocast_on(self._type, self._dtype, enabled=False):
            return func(*args, **kwargs)


class _AnyNumber(TorchFunctionMode):
    """In it a tensor without values reads as 1, as Adafactor reads the norm of a weight."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meta = func is torch.Tensor.item and args[0].is_meta
        return 1.0 if meta else func(*args, **(kwargs or {}))


def optimizer_bytes(
    name: str, parameters: Iterable[Parameter], device_type: str
) -> tuple[int, int]:
    """Bytes of the optimizer's state, and the most that its step takes on top of it.

    `name` is a key of `OPTIMIZERS` or `QUANTIZED`; `parameters` are the shape and dtype of each.
    """
    given, state, most = tuple(parameters), 0, 0
    if name in _LOOPS:
        looped = tuple(p for p in given if name == "adafactor" or len(p[0]) == 2)
        state, most = _bytes_for(name, looped, device_type)
        given, name = tuple(p for p in given if p not in looped), "adamw"
    for one, count in Counter(given).items():
        state_of_one, most_of_one = _bytes_for(name, (one,), device_type)
        state += count * state_of_one
        # In one call for all, the temporaries of all are there together; else those of one.
        together = backend(device_type).foreach and name in OPTIMIZERS
        most = most + count * most_of_one if together else max(most, most_of_one)
    return state, most


@functools.cache  # a transformer has the same few shapes in every block
def _bytes_for(name: str, given: tuple[Parameter, ...], device_type: str) -> tuple[int, int]:
    """The same for parameters in one call, from two steps on ``meta``; the first makes state."""
    device = backend(device_type)
    if name in QUANTIZED:
        ((shape, dtype),) = given
        state, work = _quantized_bytes(name, math.prod(shape), dtype.itemsize)
        return state + 4 * device.is_host, work
    with step_counters_on_host(), _AnyNumber():
        parameters = [nn.Parameter(torch.empty(s, dtype=d, device="meta")) for s, d in given]
        gradients = [torch.empty_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        options = {} if name in _LOOPS else {"foreach": device.foreach}
        optimizer = OPTIMIZERS[name](parameters, **options)
        optimizer.step()
        tensors = tensors_in(list(optimizer.state.values()))
        ledger = StorageLedger("meta")
        ledger.own("optimizer", [*parameters, *gradients, *tensors])
        ledger.mark("before")
        with ledger:
            optimizer.step()
        ledger.mark("after")
    # Counters of steps, which torch keeps on the host, take memory of the device on a CPU only.
    state = sum(t.nbytes for t in tensors if t.is_meta or device.is_host)
    trace = ledger.trace()
    in_use = trace.in_use()[trace.marks["before"] - 1 :]
    return state, int(in_use.max() - in_use[0])


def _quantized_bytes(name: str, values: int, itemsize: int) -> tuple[int, int]:
    """The same for a parameter of so many values: two moments, of which blocks share a scale."""
    bits, block, table, work = QUANTIZED[name]
    if values < 4096 or values % block:  # such stay as the parameter is
        return 2 * values * itemsize, 0
    scales = 4 * values // block
    return 2 * (values * bits // 8 + scales + table), values * work + 2 * scales


@contextmanager
def one_line_errors(model: nn.Module, shapes: tuple, device_type: str) -> Iterator[None]:
    """The block in which what a model raises becomes a `TraceError` of one line."""
    try:
        yield
    except AmpLabError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        name = type(model).__name__
        if isinstance(error, NEEDS_VALUES):
            said = f"{name}: the result of {error.func} depends on values"
            raise ValuesNeeded(said, error.func) from error
        if needs_memory(error):
            raise MemoryNeeded(f"{name}: it reads the memory of a tensor") from error
        if isinstance(error, fake_tensor.UnsupportedOperatorException):
            why = f"torch cannot run {error.func} without values"
            raise TraceError(f"{name}: {why}: {remedy_for(error, model, 'forecast')}") from error
        given = f"input of shape {', '.join(map(str, shapes))}" if shapes else "no tensor as input"
        reason = own_reason(error) or first_line(error)
        reason += tip_for(error, model, "forecast", device_type)
        raise TraceError(f"{name} with {given}: {reason}") from error


@contextmanager
def _same_every_time() -> Iterator[None]:
    """What would make one trace differ from the next, or from the device's, is off."""
    collecting, onednn = gc.isenabled(), torch._C._get_mkldnn_enabled()
    gc.disable()  # a collection would end storages at another place in the next trace
    # Its recurrent layers have no workspace as fakes; all other ops keep the same without it.
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        if collecting:
            gc.enable()
