"""What autocast does to a model: every op with its dtypes, every cast, on a device not owned."""

import contextlib
import copy
import dataclasses
import difflib
import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_lab.errors import TraceError, first_line, with_type
from amp_lab.precision import require_backend
from amp_lab.report import Printed, Table, dtype_name, listed, plural, short_name
from amp_lab.tracing.fake_device import (
    LOWER_DTYPES,
    autocast_of_the_model,
    autocast_on,
    checked_backend,
    checked_dtype,
    fake_mode,
    how_to_do_without,
    on_fake_device,
)

LOSS = "(loss)"
"""Stands for a module's name in rows of the loss."""
LARGE = 0.05
"""An op is large if it has this share of all work, or of all bytes written."""

_MAX_LINES = 28  # of the table; deeper modules are summed up
_DEEPEST = 12
_FUSED_RNNS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_RNNS = _FUSED_RNNS | {f"{name}_cell" for name in _FUSED_RNNS}
_RNN_KERNELS = {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_lstm_mps"}
_ATTENTION = "scaled_dot_product_attention"
# Each is one row, whatever kernels it chooses: that choice needs the device, the dtypes do not.
_NORMS = {"layer_norm", "group_norm", "rms_norm", "instance_norm"}
_WHOLE = _RNNS | _NORMS | {_ATTENTION, "batch_norm"}
_CASTING = {
    "to", "half", "float", "double", "bfloat16", "type", "type_as", "_to_copy", "copy_",
    "tensor", "as_tensor", "asarray",
}  # fmt: skip
# These compute nothing, and neither does an op that returns a view.
_VIEWS = {"_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "_reshape_alias"}
_PLAIN_NAMES = {"__matmul__": "matmul", "__rmatmul__": "matmul"}
_SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax")
_LOSSES = {
    "nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd", "mse_loss", "huber_loss",
    "smooth_l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "_ctc_loss",
    "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss_forward",
}  # fmt: skip
_UNSAFE = "are unsafe to autocast"
_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
_NOT_FAKED = (
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)


@dataclass(frozen=True)
class OpRecord:
    """One op that computed something, below autograd and autocast: the tensors that it really got.

    Views are left out, and so are the casts that autocast inserted, which are in `Xray.casts`.
    Attention, norms and recurrent layers are one op, since their kernels depend on the card.
    """

    module: str
    """Qualified name of the module whose code ran; ``""``: the model itself."""
    op: str
    """The op: ``convolution``, ``addmm``, ``_softmax``."""
    in_dtypes: tuple[torch.dtype, ...]
    out_dtypes: tuple[torch.dtype, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    called: str
    """The function of torch that the model called: ``conv2d``, ``linear``, ``cross_entropy``."""
    flops: int = 0
    """Multiplications and additions of a matrix product, convolution or recurrent layer."""
    autocast: bool = True
    """Whether autocast was on where it was called."""
    widened: bool = False
    """Whether autocast made it compute on a low-precision input in fp32."""
    product_dtype: torch.dtype | None = None
    """Of a recurrent layer or cell: the dtype, the widest of several, that the matrix products
    inside it computed in, which may be narrower than its state."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that it computed in.

        That of the matrix products inside a recurrent layer; else the wider of the first floating
        input and output.
        """
        if self.product_dtype is not None:
            return self.product_dtype
        found = [
            next((dtype for dtype in dtypes if dtype.is_floating_point), None)
            for dtypes in (self.in_dtypes, self.out_dtypes)
        ]
        return _widest(d for d in found if d)

    @property
    def nbytes(self) -> int:
        """Bytes that it wrote."""
        pairs = zip(self.out_shapes, self.out_dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)


@dataclass(frozen=True)
class Cast:
    """One cast that autocast inserted."""

    module: str
    from_dtype: torch.dtype
    to_dtype: torch.dtype
    what: str
    """What was cast: ``parameter NAME``, ``input 0``, ``output of OP in MODULE``."""
    cached: bool
    """Whether autocast keeps the result for further uses in the same block."""
    shape: tuple[int, ...]
    called: str
    """The function that it was cast for."""

    @property
    def nbytes(self) -> int:
        """Bytes that it wrote."""
        return math.prod(self.shape) * self.to_dtype.itemsize


@dataclass(frozen=True, repr=False)
class Xray(Printed):
    """What `xray` found; `str` of it is made to be read."""

    model: str
    """Class of the model."""
    device_type: str
    dtype: torch.dtype
    """What autocast computes in; torch.float32: autocast was off."""
    real: bool
    rows: list[OpRecord]
    casts: list[Cast]
    output_dtypes: list[torch.dtype]
    """Of each tensor of the output, in order."""
    outputs: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Place of each tensor of the output, its dtype and shape."""
    loss_dtype: torch.dtype | None
    raised: str | None
    """What autocast made fail, if it did: the rows end there."""
    advice: list[str]
    """What to look at, in sentences; each is proved by the rows and casts."""
    classes: dict[str, str] = field(repr=False)
    """Class of each module."""

    @property
    def title(self) -> str:
        """What was X-rayed, in a line."""
        how = (
            "autocast off" if self.dtype is torch.float32 else f"autocast {short_name(self.dtype)}"
        )
        seen = "a real run" if self.real else "fake tensors, no such device needed"
        return f"{self.model} on {self.device_type}, {how} ({seen})"

    @property
    def low_share(self) -> float:
        """Share of the arithmetic of matrix products and convolutions in low precision, 0 to 1."""
        total = sum(row.flops for row in self.rows)
        low = sum(row.flops for row in self.rows if row.dtype in LOWER_DTYPES)
        return low / total if total else 0.0

    def to_json(self) -> str:
        """Everything, as JSON; dtypes are written as ``float16``."""

        def plain(record: object) -> dict:
            return {
                name: _plain(value)
                for name, value in vars(record).items()
                if name not in ("classes", "rows", "casts", "outputs")
            }

        everything = plain(self)
        everything["outputs"] = {
            place: {"dtype": _plain(dtype), "shape": list(shape)}
            for place, (dtype, shape) in self.outputs.items()
        }
        everything["rows"] = [plain(row) for row in self.rows]
        everything["casts"] = [plain(cast) for cast in self.casts]
        return json.dumps(everything, indent=1)

    def _table(self) -> Table:
        total = sum(row.flops for row in self.rows)
        lines = [
            [
                group.label,
                group.kind,
                f"{group.times * group.ops:,}",
                _percent(group.times * group.flops, total),
                _mix(group.matrix, group.times),
                _mix(group.others, group.times),
                f"{group.times * group.casts:,}" if group.casts else "-",
                group.output,
            ]
            for group in _summaries(self)
        ]
        return Table(
            ["module", "class", "ops", "work", "work in", "other ops in", "casts", "output"],
            lines,
            caption=self.title,
            facts=self._facts(),
            advice=self.advice,
            right=(2, 3, 6),
        )

    def _facts(self) -> list[str]:
        facts = []
        if self.dtype is not torch.float32:
            facts.append(
                f"{100 * self.low_share:.1f} % of the work of matrix products and convolutions is "
                f"done in {short_name(self.dtype)}."
            )
            weights = [c for c in self.casts if c.what.startswith("parameter ")]
            cached = sum(cast.cached for cast in weights)
            written = _size(sum(cast.nbytes for cast in self.casts))
            facts.append(
                f"Autocast inserted {plural(len(self.casts), 'cast')}: {len(weights):,} of "
                f"parameters ({cached:,} kept in its cache), {len(self.casts) - len(weights):,} of "
                f"other values; they write {written}."
            )
        outputs = ", ".join(
            f"{place + ' ' if place else ''}{short_name(dtype)} {shape}"
            for place, (dtype, shape) in list(self.outputs.items())[:6]
        )
        if len(self.outputs) > 6:
            outputs += f" and {len(self.outputs) - 6} more"
        if outputs:
            facts.append(f"Output: {outputs}.")
        if self.loss_dtype is not None:
            facts.append(f"Loss: {short_name(self.loss_dtype)}.")
        return facts


def xray(
    model: nn.Module,
    *inputs: Any,
    device_type: str = "cuda",
    dtype: torch.dtype | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    real: bool = False,
    **kwargs: Any,
) -> Xray:
    """Which dtype each op of a model runs in under autocast, on a device that need not be here.

        print(xray(torchvision.models.resnet50(), torch.empty(8, 3, 224, 224), device_type="cuda"))

    One forward pass with `inputs` and `kwargs` on fake tensors of `device_type` ("cuda", also for
    ROCm; "xpu", "mps", "cpu"), which have shapes and dtypes, but no values. Autocast computes in
    `dtype`, its own default for None; torch.float32 leaves it off. `loss_fn`, if given, gets the
    output and runs under autocast too. `real` runs a copy of the model on the device itself. The
    model is neither moved nor changed, however the call ends.

    Raises `TraceError` for what is no model or no input, a model that is in half precision already,
    one that fails on these inputs, and one whose course depends on values, which fakes have not;
    `DeviceError` for a device type that does not exist, or is not there with `real`; `DeviceError`
    for a dtype that autocast does not take.
    """
    checked_backend(device_type)
    off = dtype is torch.float32
    low = checked_dtype(device_type, None if off else dtype)
    if real:
        require_backend(device_type)
    _check(model, inputs, kwargs, real)

    def traced(enabled: bool, made_on_cpu: bool = False) -> _Tracer:
        tracer = _Tracer(device_type, low, enabled)
        if real:
            _run_real(tracer, model, inputs, kwargs, loss_fn)
        else:
            _run_fake(tracer, model, inputs, kwargs, loss_fn, made_on_cpu)
        return tracer

    tracer = traced(not off)
    if not real and isinstance(tracer.error, RuntimeError) and "device" in str(tracer.error):
        # Some models count on tensors made without a device being on the CPU.
        again = traced(not off, made_on_cpu=True)
        tracer = tracer if again.error else again
    raised = None
    if tracer.error is not None:
        raised = _explain(tracer, model, inputs, kwargs)
        if off or traced(False).error is not None:
            raise TraceError(raised) from tracer.error
    return Xray(
        model=type(model).__name__,
        device_type=device_type,
        dtype=torch.float32 if off else low,
        real=real,
        rows=tracer.rows,
        casts=tracer.casts,
        output_dtypes=[dtype for dtype, _ in tracer.outputs.values()],
        outputs=tracer.outputs,
        loss_dtype=tracer.loss_dtype,
        raised=raised,
        advice=[] if off else _advise(tracer, raised),
        classes=tracer.classes,
    )


def _check(model: object, inputs: tuple, kwargs: dict, real: bool) -> None:
    if not isinstance(model, nn.Module):
        kind = model.__name__ if isinstance(model, type) else f"a {type(model).__name__}"
        raise TraceError(f"{kind} is no model: give an nn.Module, the model itself")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TraceError(f"{type(model).__name__} wraps the model: give its .module")
    for name, tensor in model.named_parameters():
        if tensor.dtype in LOWER_DTYPES:
            raise TraceError(
                f"parameter {name!r} is {dtype_name(tensor.dtype)} already: autocast casts float32 "
                "weights itself; call model.float() first"
            )
        if real and tensor.is_meta:
            raise TraceError(f"parameter {name!r} is on 'meta' and has no values: use real=False")
    found = 0
    for place, value in [*enumerate(inputs), *kwargs.items()]:
        name = f"input {place}" if isinstance(place, int) else f"input {place!r}"
        if isinstance(value, nn.utils.rnn.PackedSequence) and not real:
            raise TraceError(f"{name} is a PackedSequence, which has no fake copy: give it padded")
        for _, leaf in _leaves(value):
            if isinstance(leaf, torch.Tensor):
                found += 1
                if real and leaf.is_meta:
                    raise TraceError(f"{name} is on 'meta' and has no values: use real=False")
            elif hasattr(leaf, "__array__"):
                raise TraceError(
                    f"{name} is no tensor but a {type(leaf).__name__}: give torch.as_tensor of it"
                )
        sizes = isinstance(value, (tuple, list)) and bool(value)
        if not found and sizes and all(isinstance(size, int) for size in value):
            raise TraceError(f"{name} is no tensor but {value!r}: give torch.empty{tuple(value)}")
    if (inputs or kwargs) and not found:
        kind = type(inputs[0] if inputs else next(iter(kwargs.values()))).__name__
        raise TraceError(f"there is no tensor among the inputs, but a {kind}: give a tensor")


def _run_fake(tracer: "_Tracer", model, inputs, kwargs, loss_fn, made_on_cpu: bool) -> None:
    default = torch.device("cpu") if made_on_cpu else contextlib.nullcontext()
    with on_fake_device(model, inputs, kwargs, tracer.device_type, fake_mode()) as run, default:
        tracer.follow(
            model,
            run.call,
            {**run.parameters, **run.buffers},
            (run.args, run.kwargs),
            loss_fn,
            run.fake,
        )


def _run_real(tracer: "_Tracer", model: nn.Module, inputs: tuple, kwargs: dict, loss_fn) -> None:
    device = tracer.device_type
    try:
        copied, inputs, kwargs = copy.deepcopy((model, inputs, kwargs))
    except (RuntimeError, TypeError) as error:  # tensors of a graph, locks, open files
        raise TraceError(f"real=True runs a copy of the model: {first_line(error)}") from error
    copied.to(device)
    inputs, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device), (inputs, kwargs))
    devices = [] if device == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices, device_type="cuda" if device == "cpu" else device):
        tracer.follow(
            copied,
            lambda: copied(*inputs, **kwargs),
            dict([*copied.named_parameters(), *copied.named_buffers()]),
            (inputs, kwargs),
            loss_fn,
            None,
        )


class _Tracer:
    """Follows one forward pass and keeps what is in `rows`, `casts` and `outputs`."""

    def __init__(self, device_type: str, dtype: torch.dtype, enabled: bool):
        self.device_type, self.dtype, self.enabled = device_type, dtype, enabled
        self.rows: list[OpRecord] = []
        self.casts: list[Cast] = []
        self.outputs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.loss_dtype: torch.dtype | None = None
        self.classes: dict[str, str] = {}
        self.error: Exception | None = None
        self.failed: tuple[str, str] | None = None  # module and op
        self.bounces: dict[tuple[int, str, str], None] = {}  # row, and who wants it back
        self.modules: list[str] = [""]
        self.calls: list[_Call] = []
        self.in_loss = False
        self.to_fake: Callable | None = None
        self._names: dict[int, str] = {}  # by storage: of what was there before
        self._made: dict[int, int] = {}  # by storage: the row that made it last
        self._pending: list[Cast] = []

    def follow(self, model, call, state, inputs, loss_fn, to_fake) -> None:
        """Run `call`, and keep an error of it as `error`, unless it says that fakes cannot do."""
        self.to_fake = to_fake
        for name, tensor in state.items():
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            self._names.setdefault(_storage(tensor), f"{kind} {name}")
        args, kwargs = inputs
        for place, value in [*enumerate(args), *kwargs.items()]:
            for path, tensor in _tensors(value):
                self._names.setdefault(_storage(tensor), f"input {place}{path}")
        with contextlib.ExitStack() as stack:
            for name, module in model.named_modules():
                self.classes[name] = type(module).__name__
                stack.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                stack.callback(
                    module.register_forward_hook(self._leave(name), always_call=True).remove
                )
            stack.enter_context(autocast_on(self.device_type, self.dtype, enabled=self.enabled))
            stack.enter_context(autocast_of_the_model(self.device_type))
            stack.enter_context(_Functions(self))
            stack.enter_context(_Dispatch(self))
            try:
                output = call()
                self.outputs = {
                    path.lstrip("."): (tensor.dtype, tuple(tensor.shape))
                    for path, tensor in _tensors(output)
                }
                if loss_fn is not None:
                    self.in_loss = True
                    self.modules = [LOSS]
                    loss = loss_fn(output)
                    self.loss_dtype = loss.dtype if isinstance(loss, torch.Tensor) else None
            except (*_NEEDS_VALUES, *_NOT_FAKED) as error:
                raise TraceError(self._beyond_fakes(error)) from error
            except Exception as error:  # whatever the model raises; told, or raised by `xray`
                self.error = error

    def _enter(self, name: str) -> Callable:
        def enter(module: nn.Module, args: tuple) -> None:
            if not self.in_loss:
                self.modules.append(name)

        return enter

    def _leave(self, name: str) -> Callable:
        def leave(module: nn.Module, args: tuple, output: object) -> None:
            if not self.in_loss:
                while len(self.modules) > 1 and self.modules.pop() != name:
                    pass  # left without a call of its hooks

        return leave

    @property
    def module(self) -> str:
        return self.modules[-1]

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        return self._names.get(_storage(tensor), "").startswith("parameter ")

    def fail(self, op: str) -> None:
        if self.failed is None:
            self.failed = self.module, op

    def _beyond_fakes(self, error: Exception) -> str:
        module, op = self.failed or (self.module, "an op")
        where = f"op {op} in {_where(module)}"
        if isinstance(error, _NOT_FAKED):
            return (
                f"{where}: torch cannot run it on fake tensors; X-ray the modules before it one by "
                "one, or use real=True where the device is"
            )
        remedy = how_to_do_without(error) or (
            "X-ray the part before it (such as model.backbone), or use real=True where the device "
            "is"
        )
        return f"{where} depends on values, which fake tensors have not: {remedy}"

    # Ops

    def see(self, func, args: tuple, kwargs: dict, out: object) -> None:
        """Note what an op did; runs below autograd and autocast."""
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not outs:
            return
        call = self.calls[-1] if self.calls else _Call("", None, False)
        name = func._schema.name.rpartition("::")[2]
        returns = func._schema.returns
        if any(r.alias_info and not r.alias_info.is_write for r in returns) or name in _VIEWS:
            return
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name == "_to_copy" and source is not None:
            casts = source.dtype.is_floating_point and outs[0].dtype.is_floating_point
            if casts and source.dtype != outs[0].dtype and call.inserts_cast(source, outs[0]):
                self._note_cast(call, source, outs[0])
                return
        if call.whole:
            flops = _flops(name, args, outs)
            call.flops += flops
            if flops or name in _RNN_KERNELS:
                call.products.add(outs[0].dtype)
            elif name == "clone" and call.name in _RNNS and call.key(source) in call.sources:
                call.origins[_storage(outs[0])] = call.key(source)  # an argument, in another order
            return
        ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.note(call, name, ins, outs, _flops(name, args, outs))

    def note(self, call: "_Call", name: str, ins: list, outs: list, flops: int) -> None:
        """Add a row."""
        widened = any(
            c.from_dtype in LOWER_DTYPES and c.to_dtype not in LOWER_DTYPES for c in self._pending
        )
        if name in ("_softmax", "_log_softmax") and call.dtype and not call.casts:
            widened = widened or (ins[0].dtype in LOWER_DTYPES and outs[0].dtype is torch.float32)
        self.rows.append(
            OpRecord(
                module=self.module,
                op=name,
                in_dtypes=tuple(t.dtype for t in ins),
                out_dtypes=tuple(t.dtype for t in outs),
                in_shapes=tuple(tuple(t.shape) for t in ins),
                out_shapes=tuple(tuple(t.shape) for t in outs),
                called=call.name or name,
                flops=flops,
                autocast=call.dtype is not None,
                widened=widened,
            )
        )
        self._pending = []
        row = len(self.rows) - 1
        for tensor in outs:
            self._made[_storage(tensor)] = row

    def _note_cast(self, call: "_Call", source: torch.Tensor, result: torch.Tensor) -> None:
        storage = call.origin(source)
        row = self._made.get(storage)
        if storage in self._names:
            what = self._names[storage]
        elif row is not None:
            what = f"output of {self.rows[row].called} in {_where(self.rows[row].module)}"
        else:
            what = "a tensor made in " + _where(self.module)
        cast = Cast(
            module=self.module,
            from_dtype=source.dtype,
            to_dtype=result.dtype,
            what=what,
            cached=(
                source.dtype is torch.float32
                and not (call.name in _FUSED_RNNS and self.device_type == "cuda")  # one flat copy
                and result.dtype is call.dtype
                and source.requires_grad
                and source.is_leaf
                and not source._is_view()
                and torch.is_autocast_cache_enabled()
            ),
            shape=call.shapes.get(call.key(source), tuple(source.shape)),
            called=call.name,
        )
        if row is not None:
            self._made[_storage(result)] = row
            if (
                self.rows[row].widened
                and result.dtype in LOWER_DTYPES
                and source.dtype not in LOWER_DTYPES
            ):
                self.bounces.setdefault((row, self.module, call.name))
        self.casts.append(cast)
        self._pending.append(cast)


@dataclass
class _Call:
    """A function of torch that the model called."""

    name: str
    dtype: torch.dtype | None  # of autocast, None where it is off
    casts: bool  # whether it is a cast of the model's own
    whole: bool = False
    flops: int = 0
    sources: dict[int, torch.dtype] = field(default_factory=dict)  # dtypes of its arguments
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    products: set[torch.dtype] = field(default_factory=set)  # dtypes of matrix products inside
    origins: dict[int, int] = field(default_factory=dict)  # by storage: copies made inside

    def inserts_cast(self, source: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether a cast during this call is autocast's."""
        if self.casts or self.dtype is None:
            return False
        if not self.whole:
            return result.dtype in (self.dtype, torch.float32)
        # Inside of it only the cast of an argument is autocast's, and for each step of a recurrent
        # layer only the first.
        wanted = self.dtype if self.name in _RNNS | {_ATTENTION} else torch.float32
        key = self.key(source)
        if key not in self.sources or result.dtype != wanted:
            return False
        first = self.sources[key] == source.dtype
        self.sources[key] = result.dtype
        return first or self.name not in _RNNS

    def key(self, tensor: torch.Tensor) -> int:
        """What tells one argument from another: a recurrent layer takes its own to pieces."""
        return self.origin(tensor) if self.name in _RNNS else id(tensor)

    def origin(self, tensor: torch.Tensor) -> int:
        """The storage of a tensor, or of what it was copied from inside this call."""
        storage = _storage(tensor)
        return self.origins.get(storage, storage)


class _Functions(TorchFunctionMode):
    """Tells the tracer which function of torch is called, and whether autocast is on there."""

    def __init__(self, tracer: _Tracer):
        self._tracer = tracer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        tracer = self._tracer
        if tracer.in_loss and tracer.to_fake is not None:
            args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        enabled = torch.is_autocast_enabled(tracer.device_type)
        dtype = torch.get_autocast_dtype(tracer.device_type) if enabled else None
        casts = name in _CASTING or any(
            isinstance(given, torch.dtype) for given in (*args, *kwargs.values())
        )
        call = _Call(_PLAIN_NAMES.get(name, name), dtype, casts, whole=name in _WHOLE)
        tracer.calls.append(call)
        try:
            if func is F.multi_head_attention_forward:
                with _attention_seen(self):
                    return func(*args, **kwargs)
            return self._whole(call, func, args, kwargs) if call.whole else func(*args, **kwargs)
        except Exception:
            tracer.fail(call.name)
            raise
        finally:
            tracer.calls.pop()
            tracer._pending = []

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, fake_tensor.FakeTensor):
            return tensor
        return self._tracer.to_fake(tensor)

    def _whole(self, call: _Call, func: Callable, args: tuple, kwargs: dict) -> object:
        """Call a function that is one row, whatever it does inside."""
        tracer = self._tracer
        ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        call.sources = {call.key(t): t.dtype for t in ins}
        call.shapes = {call.key(t): tuple(t.shape) for t in ins}
        if call.name == _ATTENTION and tracer.to_fake and tracer.device_type != "cpu":
            out = self._attention(call.dtype, *args, **kwargs)
        elif call.name in _FUSED_RNNS and tracer.to_fake:
            out = self._rnn(call, func, args)
        else:
            out = func(*args, **kwargs)
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        flops = self._rnn_flops(ins) if call.name in _RNNS else call.flops
        if call.name == _ATTENTION:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            flops = 2 * (named["query"].numel() + outs[0].numel()) * named["key"].shape[-2]
        dtypes = tuple(call.sources[call.key(t)] for t in ins)
        tracer.note(call, call.name, ins, outs, flops)
        inside = _widest(call.products) if call.name in _RNNS else None
        tracer.rows[-1] = dataclasses.replace(
            tracer.rows[-1], in_dtypes=dtypes, product_dtype=inside
        )
        return out

    def _rnn(self, call: _Call, func: Callable, args: tuple) -> tuple[torch.Tensor, ...]:
        """A recurrent layer over the first of its steps alone: the others do the same."""
        device = self._tracer.device_type
        if call.dtype is not None:
            call.dtype = _rnn_dtype(call, device)
        steps, time = args[0], 1 if args[-1] else 0
        packed = isinstance(args[1 if call.name == "lstm" else 2], torch.Tensor)
        if not packed:
            args = (steps.narrow(time, 0, 1), *args[1:])
        with autocast_on(device, call.dtype, enabled=call.dtype is not None):
            out, *states = func(*args)
        if not packed:
            out = out.expand(*steps.shape[:2], out.shape[-1]).contiguous()
        return (out, *states)

    def _rnn_flops(self, ins: list[torch.Tensor]) -> int:
        steps = math.prod(ins[0].shape[:-1])  # of the whole batch
        weights = [t for t in ins[1:] if t.dim() == 2 and self._tracer.is_parameter(t)]
        return sum(2 * steps * weight.numel() for weight in weights)

    def _attention(self, dtype, query, key, value, *args, **kwargs) -> torch.Tensor:
        """Attention by its definition: to choose a kernel, torch would ask the absent device."""
        if dtype is not None:
            query, key, value = (
                t if t.dtype is torch.float64 else t.to(dtype) for t in (query, key, value)
            )
        mask = args[0] if args else kwargs.pop("attn_mask", None)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        dropout = args[1] if len(args) > 1 else kwargs.pop("dropout_p", 0.0)
        causal = args[2] if len(args) > 2 else kwargs.pop("is_causal", False)
        with autocast_on(self._tracer.device_type, enabled=False):
            out = torch._scaled_dot_product_attention_math(
                query, key, value, mask, dropout, causal, **kwargs
            )[0]
        # In memory as the kernels of real devices leave it: (B, T, H, D).
        return out.transpose(1, 2).contiguous().transpose(1, 2) if out.dim() == 4 else out


class _Dispatch(TorchDispatchMode):
    """Shows the tracer each op."""

    def __init__(self, tracer: _Tracer):
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            out = func(*args, **kwargs)
        except Exception:
            self._tracer.fail(func._schema.name.rpartition("::")[2])
            raise
        self._tracer.see(func, args, kwargs, out)
        return out


@contextlib.contextmanager
def _attention_seen(functions: _Functions) -> Iterator[None]:
    """Shows the attention inside of multi_head_attention_forward, which modes do not see."""
    original = F.scaled_dot_product_attention

    def seen(*args, **kwargs):
        return functions.__torch_function__(original, (), args, kwargs)

    F.scaled_dot_product_attention = seen
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _rnn_dtype(call: _Call, device_type: str) -> torch.dtype | None:
    """What autocast casts a fused recurrent layer to, which fake tensors do not reach.

    Source: ATen/cudnn/AutocastRNN.cpp, where float16 is written out, whatever autocast's dtype; and
    ATen/native/RNN.cpp, where MPS runs an op of its own that has no rule.
    """
    if device_type == "cuda":
        return torch.float16
    if device_type == "mps" and call.name == "lstm":
        return None
    return call.dtype


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=None)


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a sparse tensor has none
        return id(tensor)


def _flops(name: str, args: tuple, outs: list[torch.Tensor]) -> int:
    """Multiplications and additions, of ops that are matrix products."""
    if name in ("mm", "bmm", "mv", "dot"):
        return 2 * outs[0].numel() * args[0].shape[-1]
    if name in ("addmm", "baddbmm", "addbmm", "addmv"):
        return 2 * args[1].numel() * (args[2].shape[-1] if args[2].dim() > 1 else 1)
    if name == "convolution":
        weight, transposed = args[1], args[6]
        return 2 * (args[0] if transposed else outs[0]).numel() * math.prod(weight.shape[1:])
    return 0


def _explain(tracer: _Tracer, model: nn.Module, inputs: tuple, kwargs: dict) -> str:
    """The model's own error in a line, with the shapes that it was given."""
    shapes = ", ".join(
        f"{tuple(t.shape)} {dtype_name(t.dtype)}" for _, t in _tensors((inputs, kwargs))
    )
    where = ""
    if tracer.failed:
        where = f" in {_where(tracer.failed[0])} ({tracer.failed[1]})"
    return (
        f"{type(model).__name__} fails on input {shapes or 'of no tensor'}{where}: "
        f"{with_type(tracer.error)}"
    )


# Advice


def _advise(tracer: _Tracer, raised: str | None) -> list[str]:
    rows, low, device = tracer.rows, short_name(tracer.dtype), tracer.device_type
    advice = []
    if raised:
        tip = ""
        if _UNSAFE in str(tracer.error):
            tip = "; take binary_cross_entropy_with_logits, on logits"
        advice.append(f"Only under autocast: {raised}{tip}. The table ends there.")
    advice += _loss_advice(rows)
    work = sum(row.flops for row in rows)
    written = sum(row.nbytes for row in rows)
    wide, memory, lows, odd = (defaultdict(list) for _ in range(4))
    for row in rows:
        if row.flops and row.dtype not in LOWER_DTYPES:
            wide[row.called, row.dtype, _why(row, device)].append(row)
        elif row.dtype is torch.float32 and row.widened:
            memory[row.called].append(row)
        if (
            (row.op in _SOFTMAX or row.op in _NORMS)
            and row.dtype in LOWER_DTYPES
            and all(d in LOWER_DTYPES for d in row.out_dtypes)
        ):
            lows[row.called, row.dtype].append(row)
        if row.flops and row.dtype in LOWER_DTYPES and device != "cpu":
            problems = ", ".join(_not_whole(row, row.flops >= 0.01 * work))
            if problems:
                odd[row.called, problems].append(row)
    if work and not any(row.dtype in LOWER_DTYPES for row in rows if row.flops):
        advice.append(f"Autocast does not speed this model up: none of its work is done in {low}.")
    for (called, dtype, why), found in wide.items():
        share = sum(row.flops for row in found) / work
        untouched = _untouched(found, rows)
        if untouched or share >= LARGE:
            what = " autocast leaves it untouched," if untouched else ""
            advice.append(
                f"{called} in {_places(found)}:{what} {100 * share:.1f} % of the work stays in "
                f"{short_name(dtype)}, because {why}."
            )
    for called, found in memory.items():
        size = sum(row.nbytes for row in found)
        if size >= LARGE * written:
            advice.append(
                f"{called} in {_places(found)} stays in fp32, because autocast on {device} runs "
                f"it so: it writes {_size(size)}, {100 * size / written:.0f} % of all."
            )
    for (called, dtype), found in lows.items():
        advice.append(
            f"{called} in {_places(found)} runs in {short_name(dtype)} on {device}: its input and "
            "its output are rounded to it."
        )
    bounced = defaultdict(list)
    for row, _, wanted in tracer.bounces:
        bounced[rows[row].called, wanted].append(rows[row])
    for (called, wanted), found in bounced.items():
        advice.append(
            f"{called} in {_places(found)}: autocast takes its input from {low} to fp32, and its "
            f"output back to {low} for {wanted}."
        )
    for (called, problems), found in odd.items():
        advice.append(
            f"{called} in {_places(found)}: {problems}; matrix units take multiples of 8."
        )
    return advice + _recast(tracer)


def _loss_advice(rows: list[OpRecord]) -> list[str]:
    found = defaultdict(list)
    for row in rows:
        losses = row.op in _LOSSES or (row.op == "_log_softmax" and "cross_entropy" in row.called)
        reduces = row.module == LOSS and row.op in ("mean", "sum", "norm", "linalg_vector_norm")
        if (losses or reduces) and row.dtype in LOWER_DTYPES:
            found[row.called, row.op, row.dtype].append(row)
    return [
        f"{called} in {_places(rows)}: its {op.strip('_')} runs in {short_name(dtype)}, so the "
        "loss is computed in low precision; give it output.float()."
        for (called, op, dtype), rows in found.items()
    ]


def _why(row: OpRecord, device: str) -> str:
    if row.op in _FUSED_RNNS and device == "mps":
        return "autocast on mps has no rule for the layer"
    if not row.autocast:
        return "autocast is switched off there"
    if row.dtype is torch.float64:
        return "autocast leaves fp64 alone"
    if row.called.endswith("_") and not row.called.endswith("__"):
        return "autocast does not cast for in-place ops"
    return f"autocast on {device} has no rule that casts this call"


def _untouched(found: list[OpRecord], rows: list[OpRecord]) -> bool:
    """Whether nothing in the modules of these rows is in low precision."""
    modules = {row.module for row in found} - {"", LOSS}
    return bool(modules) and not any(
        row.module in modules and set(row.in_dtypes + row.out_dtypes) & set(LOWER_DTYPES)
        for row in rows
    )


def _not_whole(row: OpRecord, large: bool) -> Iterator[str]:
    if row.op == "convolution":
        image, weight = row.in_shapes[:2]
        if weight[1] == 1 < image[1]:
            yield "1 channel for each group (depthwise)"
            return
        sizes = {"input channels": image[1], "output channels": row.out_shapes[0][1]}
    elif row.op in ("mm", "addmm"):
        left, right = row.in_shapes[-2:]
        sizes = {"input features": right[0], "output features": right[1]}
        if large and left[0] > 8:
            sizes["rows"] = left[0]
    elif row.op in ("bmm", "baddbmm"):
        left, right = row.in_shapes[-2:]
        sizes = {"rows": left[1], "inner size": left[2], "columns": right[2]} if large else {}
    else:
        return
    for what, size in sizes.items():
        if size % 8:
            yield f"{size:,} {what}"


def _recast(tracer: _Tracer) -> list[str]:
    """Parameters that are cast anew for each use."""
    uses = Counter(
        (cast.what, cast.to_dtype)
        for cast in tracer.casts
        if cast.what.startswith("parameter ") and not cast.cached
    )
    again = [what.removeprefix("parameter ") for (what, _), count in uses.items() if count > 1]
    if not again:
        return []
    most = max(uses.values())
    return [
        f"{listed(again, 3)}: cast anew for each use, up to {most} times; autocast caches only "
        "whole parameters in fp32 that require a gradient."
    ]


# Words and tables


def _where(module: str) -> str:
    return {"": "the model itself", LOSS: "the loss"}.get(module, repr(module))


def _places(rows: list[OpRecord]) -> str:
    return listed([_where(module) for module in dict.fromkeys(row.module for row in rows)], 3)


def _percent(part: int, whole: int) -> str:
    if not part:
        return "-"
    return f"{100 * part / whole:.1f} %" if part >= 0.0005 * whole else "<0.1 %"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _plain(value: object) -> object:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _leaves(structure: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Place and value of each leaf of tuples, lists, mappings and dataclasses."""
    if isinstance(structure, Mapping):
        inner = [(f".{key}", value) for key, value in structure.items()]
    elif isinstance(structure, (list, tuple)):
        inner = [(f".{number}", value) for number, value in enumerate(structure)]
    elif dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        inner = [(f".{f.name}", getattr(structure, f.name)) for f in dataclasses.fields(structure)]
    else:
        yield path, structure
        return
    for step, value in inner:
        yield from _leaves(value, path + step)


def _tensors(structure: object) -> Iterator[tuple[str, torch.Tensor]]:
    return ((path, leaf) for path, leaf in _leaves(structure) if isinstance(leaf, torch.Tensor))


def _mix(dtypes: tuple[tuple[str, int], ...], times: int) -> str:
    if len(dtypes) == 1:
        return dtypes[0][0]
    return ", ".join(f"{name} {times * count:,}" for name, count in dtypes) or "-"


@dataclass(frozen=True)
class _Summary:
    """A line of the table: a module, or several alike in a row."""

    label: str
    kind: str
    ops: int
    flops: int
    matrix: tuple[tuple[str, int], ...]
    others: tuple[tuple[str, int], ...]
    casts: int
    output: str
    times: int = 1


def _summaries(result: Xray) -> list[_Summary]:
    """A line for each module, as deep as the table may be long."""
    seen = {row.module for row in result.rows} | {cast.module for cast in result.casts}
    inside: dict[str, set[str]] = defaultdict(set)  # module: its parts that ran
    for module in seen:
        while module and module != LOSS:
            parent = module.rpartition(".")[0]
            inside[parent].add(module)
            module = parent
    order = {name: number for number, name in enumerate(result.classes)}
    by_module: dict[str, tuple[list, list]] = defaultdict(lambda: ([], []))
    for row in result.rows:
        by_module[row.module][0].append(row)
    for cast in result.casts:
        by_module[cast.module][1].append(cast)

    def lines(depth: int) -> list[_Summary]:
        found = below("", depth)
        if LOSS in seen:
            found.append(_summary(LOSS, "loss_fn", *by_module[LOSS]))
        return found

    def below(module: str, depth: int) -> list[_Summary]:
        parts = sorted(inside[module], key=lambda name: order.get(name, len(order)))
        if not depth or not parts:
            label = module or "the model"
            rows, casts = [], []
            for name, (some, others) in by_module.items():
                if name == module or name.startswith(f"{module}."):
                    rows += some
                    casts += others
            return [_summary(label, result.classes.get(module, ""), rows, casts)]
        found: list[_Summary] = []
        if by_module[module][0] or by_module[module][1]:
            label = f"{module} itself" if module else "the model itself"
            found.append(_summary(label, result.classes.get(module, ""), *by_module[module]))
        for alike in runs_of_alike(parts):
            for line in below(alike[0], depth - 1):
                label = alike[0] + _to_last(alike) + line.label.removeprefix(alike[0])
                times = line.times * len(alike)
                found.append(dataclasses.replace(line, label=label, times=times))
        return found

    def runs_of_alike(parts: list[str]) -> Iterator[list[str]]:
        """Numbered neighbours that did the same, such as the blocks of a transformer."""
        run: list[str] = []
        for part in parts:
            if run and not (_stem(part) == _stem(run[0]) and form(part) == form(run[0])):
                yield run
                run = []
            run.append(part)
        if run:
            yield run

    @functools.cache
    def form(module: str) -> tuple:
        """What a module did, without its name."""
        whole = below(module, _DEEPEST)
        size = len(module)
        return tuple(dataclasses.replace(line, label=line.label[size:]) for line in whole)

    best = lines(1)
    for depth in range(2, _DEEPEST):
        deeper = lines(depth)
        if len(deeper) > _MAX_LINES or deeper == best:
            break
        best = deeper
    return best


def _stem(name: str) -> str:
    """A numbered name without its number, ``blocks.`` of ``blocks.3``; itself if it has none."""
    return name.rstrip("0123456789")


def _to_last(alike: list[str]) -> str:
    return f" … {alike[-1].removeprefix(_stem(alike[-1]))}" if len(alike) > 1 else ""


def _summary(label: str, kind: str, rows: list[OpRecord], casts: list[Cast]) -> _Summary:
    matrix, others = Counter(), Counter()
    for row in rows:
        if row.dtype is not None:
            (matrix if row.flops else others)[short_name(row.dtype)] += 1
    outputs = [d for row in rows[-1:] for d in row.out_dtypes[:1]]
    return _Summary(
        label,
        kind,
        len(rows),
        sum(row.flops for row in rows),
        tuple(matrix.most_common()),
        tuple(others.most_common()),
        len(casts),
        short_name(outputs[0]) if outputs else "-",
    )


# Comparison


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """Two X-rays side by side; `str` of it is made to be read."""

    a: Xray
    b: Xray
    different: list[tuple[OpRecord | None, OpRecord | None]]
    """Ops that differ in a dtype, and those that only one of the two ran."""

    @property
    def names(self) -> tuple[str, str]:
        """A short name for each."""
        named = tuple(f"{x.device_type} {short_name(x.dtype)}" for x in (self.a, self.b))
        return named if named[0] != named[1] else (f"{named[0]} (a)", f"{named[1]} (b)")

    def to_json(self) -> str:
        """The ops that differ, as JSON."""
        pairs = [
            [row and {name: _plain(value) for name, value in vars(row).items()} for row in pair]
            for pair in self.different
        ]
        return json.dumps({"names": self.names, "different": pairs}, indent=1)

    def _table(self) -> Table:
        groups: dict[tuple[str, str, str], list[OpRecord]] = defaultdict(list)
        for left, right in self.different:
            row = left or right
            groups[row.called, _flow(left), _flow(right)].append(row)
        lines = [
            [
                called,
                f"{len(rows):,}",
                one,
                other,
                listed(list(dict.fromkeys(row.module or "the model" for row in rows)), 3),
            ]
            for (called, one, other), rows in groups.items()
        ]
        return Table(
            ["called", "ops", *self.names, "where"],
            lines,
            caption=f"{self.a.model}: {self.names[0]} against {self.names[1]}",
            facts=self._facts(),
            right=(1,),
        )

    def _facts(self) -> list[str]:
        total = len(self.a.rows) + sum(left is None for left, _ in self.different)
        facts = [f"{len(self.different):,} of {total:,} ops differ."]
        for name, x in zip(self.names, (self.a, self.b), strict=True):
            outputs = ", ".join(dict.fromkeys(short_name(dtype) for dtype in x.output_dtypes))
            facts.append(
                f"{name}: {100 * x.low_share:.1f} % of the work in low precision, "
                f"{plural(len(x.casts), 'cast')}, output {outputs or 'none'}."
            )
        return facts


def _flow(row: OpRecord | None) -> str:
    if row is None:
        return "not run"
    output = row.out_dtypes[0] if row.out_dtypes else None
    if row.dtype is None or output is row.dtype:
        return short_name(output) if output else "-"
    return f"{short_name(row.dtype)} → {short_name(output)}"


def compare(a: Xray, b: Xray) -> Comparison:
    """Two X-rays of one model side by side: another device type, dtype or version of the model."""
    keys = [[(row.module, row.op) for row in x.rows] for x in (a, b)]
    different: list[tuple[OpRecord | None, OpRecord | None]] = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs = zip(a.rows[i1:i2], b.rows[j1:j2], strict=True)
            different += [
                pair
                for pair in pairs
                if len({(r.in_dtypes, r.out_dtypes, r.product_dtype) for r in pair}) > 1
            ]
        else:
            different += [(row, None) for row in a.rows[i1:i2]]
            different += [(None, row) for row in b.rows[j1:j2]]
    return Comparison(a, b, different)
