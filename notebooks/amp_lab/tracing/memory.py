"""Forecast the memory of a training step in each precision, and the largest batch that fits."""

import dataclasses
import functools
import gc
import heapq
import itertools
import json
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses import FakeTensor, fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.errors import AmpLabError, TraceError, first_line
from amp_lab.precision import Precision
from amp_lab.report import Printed, Table, dtype_name
from amp_lab.tracing.fake_device import (
    LOWER_DTYPES,
    FakeRun,
    autocast_of_the_model,
    autocast_on,
    checked_backend,
    fake_mode,
    how_to_do_without,
    on_fake_device,
)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **kw: torch.optim.SGD(parameters, lr=0.1, **kw),
    "sgd-momentum": lambda parameters, **kw: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, weight_decay=1e-4, **kw
    ),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""The optimizers by name. Each is really run, on tensors without memory, to see what it needs."""

# Devices on which torch's optimizers work on all parameters in one call, unless told otherwise,
# and then need room for temporaries as large as all of them (torch.optim, "foreach").
_FOREACH = ("cuda", "xpu")

# What a byte belongs to. The order is that of the tables.
_KINDS = (
    "weights",
    "buffers",
    "inputs",
    "gradients",
    "optimizer",
    "activations",
    "cast_cache",
    "temporaries",
)

_DEVICE_OF, _TO_COPY = torch.ops.prim.device.default, torch.ops.aten._to_copy.default

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


def parse_bytes(text: str | int) -> int:
    """The number of bytes in ``"24GiB"`` (24 x 2^30), ``"24 GB"`` (24 x 10^9) or ``"512"``.

    Raises `TraceError` for anything else, for a bare ``"24G"`` (it does not say which of
    the two it means), and for less than one byte.
    """
    written = str(int(text) if isinstance(text, float) and text.is_integer() else text)
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", written.lower())
    unit = _UNITS.get(match[2]) if match else None
    if isinstance(text, bool) or unit is None or (unit == 1 and not match[1].isdigit()):
        raise TraceError(f"memory {text!r}: give bytes, as 24GiB (24 x 2^30) or 24GB (24 x 10^9)")
    count = unit * int(match[1]) if match[1].isdigit() else int(unit * float(match[1]))
    if count < 1:
        raise TraceError(f"memory {text!r}: give at least one byte")
    return count


@dataclass(frozen=True, repr=False)
class MemoryForecast(Printed):
    """What one training step takes, in bytes; made by `forecast_memory`.

    The parts do not add up to the peak, since they are not there at one time: `at_peak` does.
    """

    model: str
    input_shapes: tuple[tuple[int, ...], ...]
    device_type: str
    precision: Precision
    optimizer_name: str
    weights: int
    buffers: int
    gradients: int
    """All of them, in the dtype of their parameters, as they stand before the optimizer's step."""
    optimizer: int
    """State that the optimizer keeps from step to step."""
    activations: int
    """What autograd keeps for the backward pass when the forward pass ends, the inputs among it if
    it needs them. Each storage counts once; parameters and casts of them are not among it."""
    cast_cache: int
    """Copies of weights in low precision, all of which live while the autocast block lasts."""
    cast_kept: int
    """The part of `cast_cache` that lives on after the block, because autograd keeps it."""
    phases: dict[str, int]
    """The most that is in use at one time in ``forward``, ``backward`` and ``optimizer``."""
    at_peak: dict[str, int]
    """What the peak consists of, by kind; its sum is `peak`."""
    caveats: tuple[str, ...] = ()
    """What in this model the forecast may be wrong about."""

    @property
    def peak(self) -> int:
        """The most that is in use at one time in the step: the largest of `phases`."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak is reached."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def temporaries(self) -> int:
        """What is in use at the peak and belongs to no other part."""
        return self.at_peak["temporaries"]

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        fields = dataclasses.asdict(self) | {"precision": str(self.precision)}
        return fields | {"peak": self.peak, "peak_phase": self.peak_phase}

    def to_json(self) -> str:
        """`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=1)

    def _table(self) -> Table:
        return MemoryTable((self,))._table()


@dataclass(frozen=True, repr=False)
class MemoryTable(Printed):
    """Forecasts for one model side by side; made by `compare_memory`."""

    forecasts: tuple[MemoryForecast, ...]
    memory_bytes: int | None = None
    largest: dict[str, int] = dataclasses.field(default_factory=dict)
    """The largest batch that fits into `memory_bytes`, by precision."""
    curves: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
    """Batches and the peak at each, by precision; what `plot` draws."""

    def __getitem__(self, precision: str) -> MemoryForecast:
        return next(f for f in self.forecasts if f.precision == precision)

    def plot(self):
        """Memory against batch for each precision, with `memory_bytes` as the card's limit."""
        from amp_lab import plots  # matplotlib only where a figure is drawn

        return plots.memory_against_batch(self.curves, self.memory_bytes)

    def to_json(self) -> str:
        """The forecasts, the memory and the largest batches as text."""
        fields: dict[str, Any] = {"forecasts": [f.as_dict() for f in self.forecasts]}
        if self.memory_bytes is not None:
            fields |= {"memory_bytes": self.memory_bytes, "largest_batch": self.largest}
        return json.dumps(fields, indent=1)

    def _title(self) -> str:
        first = self.forecasts[0]
        shapes = ", ".join("x".join(map(str, shape)) for shape in first.input_shapes)
        return (
            f"{first.model}, input {shapes}, one training step with {first.optimizer_name} "
            f"on {first.device_type}"
        )

    def _table(self) -> Table:
        largest = max(f.peak for f in self.forecasts)
        unit, name = (2**30, "GiB") if largest >= 10 * 2**30 else (2**20, "MiB")

        def row(label: str, value: Callable[[MemoryForecast], int]) -> list[str]:
            cells = [value(f) for f in self.forecasts]
            return [label, *[_figure(cell, unit) for cell in cells]]

        rows = [
            row("weights", lambda f: f.weights),
            row("buffers", lambda f: f.buffers),
            row("gradients", lambda f: f.gradients),
            row("optimizer state", lambda f: f.optimizer),
            row("activations kept for backward", lambda f: f.activations),
            row("weights cast by autocast", lambda f: f.cast_cache),
            row("temporaries at the peak", lambda f: f.temporaries),
        ]
        foot = [
            row("peak of the step", lambda f: f.peak),
            ["reached in", *[f.peak_phase for f in self.forecasts]],
        ]
        if self.memory_bytes is not None:
            largest = [f"{self.largest[f.precision]:,}" for f in self.forecasts]
            foot.append([f"largest batch in {_amount(self.memory_bytes)}", *largest])
        return Table(
            [f"in {name}", *[str(f.precision) for f in self.forecasts]],
            rows,
            caption=self._title(),
            facts=self._notes(),
            foot=foot,
            right=range(1, 1 + len(self.forecasts)),
        )

    def _notes(self) -> list[str]:
        return [
            "The parts are not all there at one time, so they do not add up to the peak.",
            "Not counted: what the driver and its libraries take for themselves.",
            *self.forecasts[0].caveats,
        ]


def _figure(count: int, unit: int) -> str:
    value = count / unit
    return f"{value:,.0f}" if value >= 100 or not count else f"{value:.3g}"


def _amount(count: int) -> str:
    """A number of bytes in the unit in which it is a short number."""
    for name, unit in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6)):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def forecast_memory(
    model: nn.Module,
    *inputs: Any,
    device_type: str = "cuda",
    precision: Precision | str,
    optimizer: str = "adam",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    **kwargs: Any,
) -> MemoryForecast:
    """Forecast the memory of one training step of `model` on a device that need not be there.

    The step is ``loss_fn(model(*inputs, **kwargs)).backward(); optimizer.step()``, under autocast
    for fp16 and bf16, as it is from the second time on: the optimizer has its state, and no
    gradient is left from the step before. It runs on fake tensors, which have no memory: the
    forward pass with the autocast rules of the device, the backward pass node by node in the order
    of torch's engine, the optimizer on the shapes of the parameters. Each storage counts from its
    making to its end, so that views, in-place ops and activation checkpointing (without
    ``use_reentrant``) count for what they are. The peak is the most that is in use at one time;
    with torch 2.11 it can be too high next to an `autograd.Function`, never too low.

    `inputs` and `kwargs` are tensors, or structures of them, on any device, also ``meta``; only
    shape and dtype matter. Without `loss_fn` every floating-point output gets a gradient of its own
    size, as from a loss that keeps nothing for itself; give one, from the output of the model to
    one number, if the loss is large, as that of a language model is. `optimizer` is a key of
    `OPTIMIZERS`.

    Attention on ``cuda`` is taken to run fused (flash or memory-efficient) wherever torch does that
    on a recent GPU. Not counted: the workspaces of cuBLAS and cuDNN, the memory that the driver
    takes, and what the allocator loses by rounding and fragmentation.

    Raises `TraceError` for a model with parameters in low precision already, an input that
    the model does not take, an op whose result depends on values, an unknown precision or
    optimizer, and a device type on which autograd cannot be followed here; `DeviceError` for an
    unknown device type; `TraceError` for a model that has no fake copy.
    """
    job = _checked_job(model, device_type, precision, optimizer, loss_fn)
    with job.opened() as run:
        return job.trace(run, run.fake(inputs), run.fake(kwargs)).forecast()


def largest_batch(
    model: nn.Module,
    input_shape: Sequence[int] | Sequence[Sequence[int]],
    *,
    memory_bytes: int | str,
    precision: Precision | str,
    device_type: str = "cuda",
    optimizer: str = "adam",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    input_dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
) -> int:
    """The largest batch whose training step fits into `memory_bytes`; 0 if not even one fits.

    `input_shape` has a batch dimension of 1 first, as in ``(1, 3, 224, 224)``, or none, as in
    ``(3, 224, 224)``: a first dimension other than 1 is no batch. A model with several inputs gets
    a sequence of such shapes, and one `input_dtype` for all or for each. For the step and the
    other arguments see `forecast_memory`.

    It is solved, not tried: two forecasts give the size of every storage as a constant plus a
    multiple of the batch, and with that the peak of every batch; a third forecast, at the solution,
    must agree. Raises what `forecast_memory` raises, and `TraceError` if the memory is no
    such number, or the sizes do not grow so.
    """
    limit = parse_bytes(memory_bytes)
    _, inputs = _checked_inputs(input_shape, input_dtype, batched=False)
    job = _checked_job(model, device_type, precision, optimizer, loss_fn)
    with job.opened() as run:
        return _ByBatch(job, run, inputs, limit=limit).largest


def compare_memory(
    model: nn.Module,
    input_shape: Sequence[int] | Sequence[Sequence[int]],
    *,
    memory_bytes: int | str | None = None,
    precisions: Iterable[Precision | str] = (Precision.FP32, Precision.FP16, Precision.BF16),
    device_type: str = "cuda",
    optimizer: str = "adam",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    input_dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
) -> MemoryTable:
    """Forecasts in several precisions side by side, with the largest batch that fits into memory.

    The forecasts are for `input_shape` as it is, whose first size is the batch. tf32 needs what
    fp32 does. The rest is as for `largest_batch`, which is asked only if there is a `memory_bytes`.
    """
    limit = None if memory_bytes is None else parse_bytes(memory_bytes)
    precisions = [_checked_precision(precision) for precision in precisions]
    if not precisions:
        raise TraceError("precisions is empty; give at least one")
    batch, inputs = _checked_inputs(input_shape, input_dtype, batched=True)
    jobs = [_checked_job(model, device_type, p, optimizer, loss_fn) for p in precisions]
    solved: dict[str, _ByBatch] = {}
    twins: dict[int, _ByBatch] = {}  # by the size of a number
    with jobs[0].opened() as run:
        for job in jobs:
            size = job.precision.dtype.itemsize
            by = _ByBatch(job, run, inputs, limit=limit, twin=twins.get(size))
            solved[str(job.precision)] = twins[size] = by
    largest = {} if limit is None else {p: by.largest for p, by in solved.items()}
    end = max([2 * batch, 16, *(5 * n // 4 for n in largest.values())])
    batches = tuple(sorted({max(1, end * i // 16) for i in range(17)}))
    return MemoryTable(
        tuple(by.at(batch) for by in solved.values()),
        limit,
        largest,
        {p: (batches, tuple(by.at(b).peak for b in batches)) for p, by in solved.items()},
    )


def _checked_precision(precision: Precision | str) -> Precision:
    try:
        return Precision(precision)
    except ValueError:
        names = ", ".join(Precision)
        raise TraceError(f"precision {precision!r}: give one of {names}") from None


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise TraceError(f"input shape {sizes}: give sizes of 1 or more")
    return sizes


def _checked_inputs(
    input_shape: Sequence[int] | Sequence[Sequence[int]],
    input_dtype: torch.dtype | Sequence[torch.dtype],
    *,
    batched: bool,
) -> tuple[int, list[tuple[tuple[int, ...], torch.dtype]]]:
    """The batch, and for each input the shape of one item and its dtype.

    With `batched`, the first size of each is the batch, else only if it is 1.
    """
    given = tuple(input_shape)
    several = bool(given) and all(isinstance(shape, Sequence) for shape in given)
    shapes = [_checked_shape(shape) for shape in (given if several else (given,))]
    one = isinstance(input_dtype, torch.dtype)
    dtypes = [input_dtype] * len(shapes) if one else list(input_dtype)
    if len(dtypes) != len(shapes):
        raise TraceError(
            f"{len(dtypes)} input dtypes for {len(shapes)} inputs: give one for all, or one for "
            "each"
        )
    batches = {shape[0] for shape in shapes}
    if not batched and batches != {1}:
        return 1, list(zip(shapes, dtypes, strict=True))
    if len(batches) > 1:
        raise TraceError(
            f"inputs of shapes {', '.join(map(str, shapes))}: the first size is the batch; give "
            "the same for all"
        )
    return shapes[0][0], [(s[1:], dtype) for s, dtype in zip(shapes, dtypes, strict=True)]


def _checked_job(
    model: nn.Module,
    device_type: str,
    precision: Precision | str,
    optimizer: str,
    loss_fn: Callable[[Any], torch.Tensor] | None,
) -> "_Job":
    if not isinstance(model, nn.Module):
        raise TraceError(f"the model must be an nn.Module, not {type(model).__name__}")
    precision = _checked_precision(precision)
    checked_backend(device_type)
    if optimizer not in OPTIMIZERS:
        raise TraceError(f"optimizer {optimizer!r}: give one of {', '.join(OPTIMIZERS)}")
    for name, parameter in model.named_parameters():
        if parameter.dtype.is_floating_point and parameter.dtype.itemsize < 4:
            raise TraceError(
                f"parameter {name} is {dtype_name(parameter.dtype)} already: autocast works on "
                "fp32 weights; give the model before .half() or .to(dtype), or call model.float()"
            )
    return _Job(model, device_type, precision, optimizer, loss_fn)


@dataclass(frozen=True)
class _Job:
    """What to forecast, checked, all but the inputs."""

    model: nn.Module
    device_type: str
    precision: Precision
    optimizer: str
    loss_fn: Callable[[Any], torch.Tensor] | None

    @contextmanager
    def opened(self) -> Iterator[FakeRun]:
        """The block in which traces can be made; opening it takes as long as half a trace."""
        with (
            _no_collection(),
            on_fake_device(self.model, (), {}, self.device_type, fake_mode()) as run,
            torch.enable_grad(),
            _without_onednn(),
            autocast_of_the_model(self.device_type),
        ):
            yield run

    def trace(self, run: FakeRun, inputs: tuple, kwargs: dict[str, Any]) -> "_Trace":
        """Run one step on fake inputs and note every storage's coming and going."""
        name = type(self.model).__name__
        given = pytree.tree_leaves((inputs, kwargs))
        shapes = tuple(tuple(leaf.shape) for leaf in given if isinstance(leaf, torch.Tensor))
        ledger = _Ledger(self.device_type)
        ledger.own("weights", run.parameters.values())
        ledger.own("buffers", run.buffers.values())
        ledger.own("inputs", given)
        tensors = {f"model.{name}": t for name, t in (run.parameters | run.buffers).items()}
        fused = _FusedAttention() if self.device_type == "cuda" else nullcontext()
        with _one_line_errors(name, shapes), ledger, fused:
            gradients = torch.func.functional_call(
                _Inside(self.model),
                tensors,
                (lambda: self._step(ledger, inputs, kwargs),),
                tie_weights=False,
            )
            leaves = {id(p): p for p in run.parameters.values() if id(p) in gradients}
            ledger.own("gradients", [gradients[key] for key in leaves])
            trained = tuple((tuple(p.shape), p.dtype) for p in leaves.values())
            ledger.mark("backward")
        return ledger.trace(self, shapes, trained)

    def _step(
        self, ledger: "_Ledger", inputs: tuple, kwargs: dict[str, Any]
    ) -> dict[int, torch.Tensor]:
        """Forward and backward pass; the gradients of the leaves, by the id of the leaf."""
        low = self.precision.dtype is not torch.float32
        hooks = torch.autograd.graph.saved_tensors_hooks(ledger.keep, lambda tensor: tensor)
        with autocast_on(self.device_type, self.precision.dtype if low else None, enabled=low):
            with hooks:
                output = self.model(*inputs, **kwargs)
                if self.loss_fn is not None:
                    output = _checked_loss(self.loss_fn(output))
            ledger.mark("cached")
        ledger.mark("forward")
        leaves = pytree.tree_leaves(output)
        seeds = [
            (torch.autograd.graph.get_gradient_edge(leaf), torch.ones_like(leaf))
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        ]
        if not seeds and any(p.requires_grad for p in self.model.parameters()):
            raise TraceError(
                f"no gradient leads from what {type(self.model).__name__} returns "
                f"({type(output).__name__}) to its parameters: give a loss_fn that makes a loss of "
                "it, and let the forward pass record gradients"
            )
        del output, leaves
        return _backward(seeds)


class _Inside(nn.Module):
    """Calls a function, while `functional_call` has other tensors in the model's place.

    For the whole step, since activation checkpointing calls modules again in the backward pass.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def _checked_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TraceError(f"loss_fn must return one number, not {found}")
    return loss


@contextmanager
def _one_line_errors(name: str, shapes: tuple) -> Iterator[None]:
    given = ", ".join(str(shape) for shape in shapes)
    given = f"input of shape {given}" if given else "no tensor as input"
    try:
        yield
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
    ) as error:
        remedy = how_to_do_without(error) or "forecast the part of the model before or after it"
        raise TraceError(
            f"{name}: the result of {error.func} depends on values, which a forecast does not have:"
            f" {remedy}"
        ) from error
    except fake_tensor.UnsupportedOperatorException as error:
        raise TraceError(
            f"{name}: torch cannot run {error.func} without values; forecast the model without it"
        ) from error
    except AmpLabError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise TraceError(f"{name} with {given}: {first_line(error)}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection, which would end storages at other places in the next trace."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _batch_norm(x, weight, bias, mean, variance, training, momentum, eps):
    """The results of `aten.native_batch_norm`: output, and mean and deviation as the kernels do."""
    statistics = (x.size(1),) if training else (0,)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), *(x.new_empty(statistics, dtype=dtype) for _ in range(2))


def _batch_norm_backward(grad, x, weight, mean, variance, save_mean, save_std, train, eps, wanted):
    """The results of `aten.native_batch_norm_backward`: gradients of input, weight and bias."""
    scale = x.new_empty((x.size(1),), dtype=torch.float32) if weight is None else weight
    return tuple(
        torch.empty_like(of) if wants else None
        for of, wants in zip((x, scale, scale), wanted, strict=True)
    )


# For these, fake tensors take a long way through Python, which also gives the statistics the dtype
# of the input, as no kernel does.
_WITHOUT_DETOUR = {
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}


@contextmanager
def _without_onednn() -> Iterator[None]:
    """oneDNN off, whose recurrent layers have no workspace as fakes; other ops keep the same."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class _Ledger(TorchDispatchMode):
    """Notes when each storage on a device is made and when it ends."""

    def __init__(self, device_type: str):
        super().__init__()
        self._device_type = device_type
        self.sizes: list[int] = []  # of each storage, in bytes
        self.log: list[int] = []  # i: storage i was made; ~i: it ended
        self.marks: dict[str, int] = {}  # name: length of the log then
        self.kinds: dict[int, str] = {}
        self.kept: set[int] = set()  # what autograd keeps
        self._numbers: dict[int, int] = {}  # address of a living storage: its number
        self._watches: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        short = _WITHOUT_DETOUR.get(func) if args and isinstance(args[0], FakeTensor) else None
        result = (short or func)(*args, **(kwargs or {}))
        if func is _DEVICE_OF:  # asked for more often than all else
            return result
        for leaf in result if isinstance(result, (tuple, list)) else (result,):
            for tensor in leaf if isinstance(leaf, (tuple, list)) else (leaf,):
                self._number(tensor)
        if func is _TO_COPY and result.dtype != args[0].dtype:
            source, made = self._number(args[0]), self._number(result)
            if self.kinds.get(source) == "weights" and made is not None and made != source:
                self.kinds[made] = "cast_cache"
        return result

    def _number(self, tensor: Any) -> int | None:
        """The number of the tensor's storage, a new one if it is new; None if it is elsewhere."""
        if not isinstance(tensor, torch.Tensor):
            return None
        # A fake's own attribute: asking for .device goes through all modes, and takes long.
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type != self._device_type:
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            number = self._numbers[address] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self.log.append(number)

            def end(_: weakref.ref) -> None:
                self.log.append(~number)
                del self._numbers[address], self._watches[number]

            self._watches[number] = weakref.ref(storage, end)
        return self._numbers[address]

    def own(self, kind: str, tensors: Iterable[Any]) -> None:
        """Say to which kind the storages of these tensors belong, unless it was said before."""
        for tensor in tensors:
            number = self._number(tensor)
            if number is not None:
                self.kinds.setdefault(number, kind)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook for what autograd saves."""
        number = self._number(tensor)
        if number is not None:
            self.kept.add(number)
        # Detached, or a node that saves its own output would hold itself and never be freed.
        return tensor if tensor.grad_fn is None else tensor.detach()

    def mark(self, name: str) -> None:
        self.marks[name] = len(self.log)

    def trace(self, job: _Job, shapes: tuple, trained: tuple) -> "_Trace":
        # Storages that end together do so in any order (autocast's cache is a hash table).
        cuts = [0, *self.marks.values()]
        log = np.array(
            [
                event
                for begin, end in itertools.pairwise(cuts)
                for made, run in itertools.groupby(self.log[begin:end], lambda event: event >= 0)
                for event in (run if made else sorted(run))
            ],
            dtype=np.int64,
        )
        self._watches.clear()  # the storages that are left end now, and nobody should be told
        alive = set()
        for event in log[: self.marks["forward"]]:
            alive.symmetric_difference_update((int(event if event >= 0 else ~event),))
        kinds = dict(self.kinds)
        for number in self.kept & alive:
            if kinds.get(number, "inputs") == "inputs":
                kinds[number] = "activations"
        return _Trace(
            job=job,
            shapes=shapes,
            trained=trained,
            sizes=np.array(self.sizes, dtype=np.int64),
            kinds=np.array(
                [_KINDS.index(kinds.get(i, "temporaries")) for i in range(len(self.sizes))]
            ),
            log=log,
            marks=dict(self.marks),
        )


@dataclass(frozen=True)
class _Trace:
    """The coming and going of storages in one step."""

    job: _Job
    shapes: tuple[tuple[int, ...], ...]
    trained: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shapes of what has a gradient
    sizes: np.ndarray  # (storages,) bytes
    kinds: np.ndarray  # (storages,) index into _KINDS
    log: np.ndarray  # (events,) see _Ledger
    marks: dict[str, int]

    def equals(self, other: "_Trace") -> bool:
        """Whether all storages come and go alike, whatever the precision is called."""
        return self.marks == other.marks and all(
            np.array_equal(mine, its)
            for mine, its in (
                (self.log, other.log),
                (self.sizes, other.sizes),
                (self.kinds, other.kinds),
            )
        )

    def forecast(self) -> MemoryForecast:
        state, work = _optimizer_bytes(self.job.optimizer, self.trained, self.job.device_type)
        made = self.log >= 0
        number = np.where(made, self.log, ~self.log)
        live = np.cumsum(np.where(made, 1, -1) * self.sizes[number]) + state  # (events,)
        cached, forward, backward = (self.marks[m] for m in ("cached", "forward", "backward"))
        at = {  # the event at which the most is in use
            "forward": int(np.argmax(live[:forward])),
            "backward": forward - 1 + int(np.argmax(live[forward - 1 : backward])),
            "optimizer": backward - 1,
        }
        phases = {name: int(live[event]) for name, event in at.items()}
        phases["optimizer"] += work
        peak_phase = max(phases, key=phases.__getitem__)

        def by_kind(end: int) -> dict[str, int]:
            there = np.bincount(number[:end], np.where(made[:end], 1, -1), len(self.sizes))
            sums = np.bincount(
                self.kinds, (there * self.sizes).astype(np.float64), minlength=len(_KINDS)
            )
            return dict(zip(_KINDS, map(int, sums), strict=True))

        at_peak = by_kind(at[peak_phase] + 1)
        at_peak["optimizer"] += state
        if peak_phase == "optimizer":
            at_peak["temporaries"] += work
        end_of_forward, end_of_backward = by_kind(forward), by_kind(backward)
        return MemoryForecast(
            model=type(self.job.model).__name__,
            input_shapes=self.shapes,
            device_type=self.job.device_type,
            precision=self.job.precision,
            optimizer_name=self.job.optimizer,
            weights=end_of_forward["weights"],
            buffers=end_of_forward["buffers"],
            gradients=end_of_backward["gradients"],
            optimizer=state,
            activations=end_of_forward["activations"],
            cast_cache=by_kind(cached)["cast_cache"],
            cast_kept=end_of_forward["cast_cache"],
            phases=phases,
            at_peak=at_peak,
            caveats=_caveats(self.job.model),
        )


def _caveats(model: nn.Module) -> tuple[str, ...]:
    kinds = {type(m).__name__ for m in model.modules() if isinstance(m, nn.RNNBase)}
    return tuple(
        f"{kind}: forecast with torch's own kernels; cuDNN or oneDNN may keep twice as much."
        for kind in sorted(kinds)
    )


def _backward(
    seeds: list[tuple[torch.autograd.graph.GradientEdge, torch.Tensor]],
) -> dict[int, torch.Tensor]:
    """The gradients of the leaves, by the id of the leaf, from a walk over the graph.

    torch's engine asks the device for its streams, and there may be no device, so its work is done
    here: nodes run latest first, each as soon as all its gradients are there, and what it kept is
    freed after it. The nodes themselves are torch's. `seeds` is emptied, so that no node outlives
    its turn.

    Where the node of an `autograd.Function` ends with what leads to it, that stays until the node
    has run; what it kept is then freed later than by the engine.
    """
    waits = _uses([edge.node for edge, _ in seeds])
    pending: dict[torch.autograd.graph.Node, dict[int, torch.Tensor]] = {}
    owners: dict[torch.autograd.graph.Node, Any] = {}
    for edge, gradient in seeds:
        pending.setdefault(edge.node, {})[edge.output_nr] = gradient
        owners[edge.node] = edge.ownership_token
    tie = itertools.count()
    ready = [(-node._sequence_nr(), next(tie), node) for node in pending if not waits[node]]
    heapq.heapify(ready)
    seeds.clear()
    # Here and below: no name may keep alive what the engine would free.
    edge = node = gradient = owner = None
    leaves: dict[int, torch.Tensor] = {}
    group = getattr(torch.utils.checkpoint, "GraphExecGroup", nullcontext)
    with torch.no_grad(), group():
        while ready:
            node = heapq.heappop(ready)[2]
            waits.pop(node, None)
            arrived, owner = pending.pop(node, {}), owners.pop(node, None)
            if hasattr(node, "variable"):
                _accumulate(leaves, node.variable, arrived.get(0))
                del node, arrived, owner
                continue
            results = _call(node, arrived)
            children = node.next_functions
            for child, _ in children:
                if isinstance(child, torch._C._FunctionBase) and _OWNED_BY_PARENTS:
                    owners[child] = node, owner
            del node, arrived, owner  # with it goes what it kept, as the engine frees it now
            for i, (child, index) in enumerate(children):
                if child is None:
                    continue
                gradient = results[i] if i < len(results) else None
                if gradient is not None:
                    _arrive(pending.setdefault(child, {}), index, gradient, child)
                del gradient
                waits[child] -= 1
                if not waits[child]:
                    heapq.heappush(ready, (-child._sequence_nr(), next(tie), child))
            child = children = results = None
    return leaves


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


def _are_owned_by_parents() -> bool:
    """Whether the node of an `autograd.Function` ends with what leads to it, as in torch 2.11."""
    node = _Identity.apply(torch.ones(1, requires_grad=True)).grad_fn
    try:
        return not node.next_functions
    except RuntimeError:
        return True


_OWNED_BY_PARENTS = _are_owned_by_parents()


def _uses(
    roots: list[torch.autograd.graph.Node],
) -> Counter[torch.autograd.graph.Node]:
    """How many gradients each node under the roots waits for."""
    waits: Counter[torch.autograd.graph.Node] = Counter()
    seen, found = set(roots), list(roots)
    while found:
        for child, _ in found.pop().next_functions:
            if child is not None:
                waits[child] += 1
                if child not in seen:
                    seen.add(child)
                    found.append(child)
    return waits


def _call(
    node: torch.autograd.graph.Node, arrived: dict[int, torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """What the node makes of its gradients; nothing, if it has none."""
    metadata = node._input_metadata
    if not arrived:
        return ()
    gradients = [arrived.get(i) for i in range(len(metadata))]
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # an autograd.Function
        if node.name() == "CheckpointFunctionBackward":
            raise TraceError(
                "activation checkpointing with use_reentrant=True starts an engine of its own, "
                "which needs the device; use use_reentrant=False"
            )
        if getattr(node, "materialize_grads", True):
            gradients = [
                torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
                for g, m in zip(gradients, metadata, strict=True)
            ]
        results = node.apply(*gradients)
    else:
        results = node(*gradients)
    return results if isinstance(results, tuple) else (results,)


def _arrive(at: dict[int, torch.Tensor], index: int, gradient: torch.Tensor, child: Any) -> None:
    """Add a gradient to those that wait for a node, in the node's dtype and shape."""
    expected = child._input_metadata[index]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    if gradient.dtype != expected.dtype:
        gradient = gradient.to(expected.dtype)
    at[index] = at[index] + gradient if index in at else gradient


def _accumulate(
    leaves: dict[int, torch.Tensor], leaf: torch.Tensor, gradient: torch.Tensor | None
) -> None:
    """What the engine does at a leaf: take the gradient over if it may, else copy or add it."""
    if gradient is None:
        return
    if id(leaf) in leaves:
        leaves[id(leaf)].add_(gradient)
        return
    owns_it = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
    leaves[id(leaf)] = gradient if owns_it else gradient.clone()


class _FusedAttention(TorchFunctionMode):
    """Runs scaled-dot-product attention as a GPU does, which a torch without one does not know.

    The rules are those of torch's sdp_utils: flash for low precision without a mask, else the
    memory-efficient kernel; what neither takes is left to torch, which computes it step by step.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    plain = torch._C._nn.scaled_dot_product_attention
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (
            t.to(dtype) if t.dtype == torch.float32 else t for t in (query, key, value)
        )
    head = query.size(-1)
    low = query.dtype in LOWER_DTYPES
    same = query.dim() == 4 and head == key.size(-1) == value.size(-1)
    if attn_mask is None and low and same and head <= 256:
        pad = -head % 8
        padded = [nn.functional.pad(t, (0, pad)) if pad else t for t in (query, key, value)]
        scale = head**-0.5 if scale is None else scale
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale
        )[0]
        return result[..., :head] if pad else result
    aligned = head % (8 if low else 4) == 0 and value.size(-1) % (8 if low else 4) == 0
    if query.dim() == 4 and aligned and not enable_gqa and query.dtype != torch.float64:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                    ~attn_mask, -torch.inf
                )
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.size(-2))
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]
    return plain(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _optimizer_bytes(
    name: str, shapes: Iterable[tuple[tuple[int, ...], torch.dtype]], device_type: str
) -> tuple[int, int]:
    """Bytes of the optimizer's state, and the most that its step takes on top of it.

    Where torch's optimizers work on all parameters in one call, the temporaries of all are there
    together; else those of one parameter at a time.
    """
    together = device_type in _FOREACH
    state = work = 0
    for (shape, dtype), count in Counter(shapes).items():
        its_state, its_work = _optimizer_bytes_of_one(name, shape, dtype, device_type)
        state += count * its_state
        work = work + count * its_work if together else max(work, its_work)
    return state, work


@functools.cache
def _optimizer_bytes_of_one(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device_type: str
) -> tuple[int, int]:
    """The same for one parameter, from two steps on ``meta``: the first makes the state.

    Counters of steps, which torch keeps on the host, count on a CPU only. Torch 2.11 makes them on
    the default device, and that is the device of the run.
    """
    ledger = _Ledger("meta")
    with torch.device("cpu"):
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        parameter.grad = torch.empty_like(parameter)
        optimizer = OPTIMIZERS[name]([parameter], foreach=device_type in _FOREACH)
        optimizer.step()
        tensors = [t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor)]
        ledger.own("optimizer", [parameter, parameter.grad, *tensors])
        begin = len(ledger.log)
        with ledger:
            optimizer.step()
    state = [
        t.numel() * t.itemsize for t in tensors if t.device.type == "meta" or device_type == "cpu"
    ]
    changes = [ledger.sizes[e] if e >= 0 else -ledger.sizes[~e] for e in ledger.log[begin:]]
    return sum(state), max(itertools.accumulate(changes, initial=0))


class _ByBatch:
    """The memory of a step as a function of the batch, from the traces of two batches.

    `largest` is the largest batch within `limit` bytes, if there is one, and 0 if none fits. A
    trace of a third batch, the largest or else some other, has agreed. With a `twin`, the same in
    another precision, one trace is enough if it equals that of the twin.
    """

    _FIRST, _SECOND, _THIRD = 2, 3, 7  # not 1, where some ops and layers do something else

    def __init__(
        self,
        job: _Job,
        run: FakeRun,
        inputs: list[tuple[tuple[int, ...], torch.dtype]],
        *,
        limit: int | None,
        twin: "_ByBatch | None" = None,
    ):
        self._job, self._run, self._inputs = job, run, inputs
        self._second = self._trace(self._SECOND)
        if twin is not None and self._second.equals(twin._second):
            self._first = dataclasses.replace(twin._first, job=job)
            self._slope, self.largest = twin._slope, twin.largest
            return
        self._first = self._trace(self._FIRST)
        self._check(np.array_equal(self._first.log, self._second.log))
        self._slope = self._second.sizes - self._first.sizes  # bytes per item of the batch
        self.largest = 0 if limit is None else self._solve(limit)
        third = self.largest if self.largest > self._SECOND else self._THIRD
        self._check(self.at(third) == self._trace(third).forecast())

    def _trace(self, batch: int) -> _Trace:
        device = self._job.device_type
        inputs = tuple(
            torch.empty(batch, *shape, dtype=dtype, device=device) for shape, dtype in self._inputs
        )
        try:
            return self._job.trace(self._run, inputs, {})
        except TraceError as error:
            raise TraceError(f"{error} (tried with a batch of {batch})") from error

    def _check(self, agrees: bool) -> None:
        if not agrees:
            raise TraceError(
                f"{type(self._job.model).__name__}: its memory is not a constant plus a multiple "
                "of the batch; forecast the batches one by one"
            )

    def at(self, batch: int) -> MemoryForecast:
        """The forecast for a batch."""
        sizes = self._first.sizes + self._slope * (batch - self._FIRST)
        shapes = tuple((batch, *shape) for shape, _ in self._inputs)
        return dataclasses.replace(self._first, sizes=sizes, shapes=shapes).forecast()

    def _solve(self, limit: int) -> int:
        if self.at(1).peak > limit:
            return 0
        low, high = 1, 2  # fits, and perhaps not
        while self.at(high).peak <= limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.at(middle).peak <= limit else (low, middle)
        return low
