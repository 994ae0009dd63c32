"""Follow a model through one forward pass and note each op and each cast that autocast inserts.

Two modes look on. `Tracer` sits above autocast and sees which function of torch the model calls;
`_Ops` sits below it and shows it the ops that the call becomes, with the dtypes they really get.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from amp_lab.backends import backend
from amp_lab.errors import TraceError, first_line
from amp_lab.report import listed
from amp_lab.tracing.attention import ATTENTION, Attention
from amp_lab.tracing.backward import (
    functions_of_the_model,
    lacks_formula,
    run_backward,
    seeds_of,
)
from amp_lab.tracing.decisions import MemoryNeeded, NotAnswered, ValuesNeeded
from amp_lab.tracing.fake_device import (
    FOR_REAL,
    NEEDS_VALUES,
    ModelRun,
    PlainOpsMode,
    attribute_set,
    autocast_on,
    needs_memory,
    remedy_for,
)
from amp_lab.tracing.operands import Kind, MixedCall, Operand, Sources, mixed_call
from amp_lab.tracing.ops_seen import LOWER_DTYPES, computes_nothing, flops, storage_key, tensors_in
from amp_lab.tracing.records import LOSS, RNN_LAYERS, Cast, OpRecord, place_of, widest
from amp_lab.tracing.running_module import ModuleCalls, Outputs, RunningModule, outputs_of
from amp_lab.tracing.structures import named_tensors

NORMS = {"layer_norm", "group_norm", "rms_norm", "instance_norm"}

_MADE_OF = {"instance_norm": ("batch_norm",)}

_RNNS = RNN_LAYERS | {f"{name}_cell" for name in RNN_LAYERS}
_INTEGERS = {torch.int16, torch.int32, torch.int64}
_RNN_KERNELS = {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_lstm_mps"}
# Each is one row, whatever kernels it chooses: that choice needs the device, the dtypes do not.
_WHOLE = _RNNS | NORMS | {ATTENTION, "batch_norm"}
# A cast inside one of these was asked for by the model, not inserted by autocast.
_CASTING = {
    "to", "half", "float", "double", "bfloat16", "type", "type_as", "_to_copy", "copy_",
    "tensor", "as_tensor", "asarray",
}  # fmt: skip
_SDPA = F.scaled_dot_product_attention
_PLAIN_NAMES = {"__matmul__": "matmul", "__rmatmul__": "matmul"}
_NOT_FAKED = (fake_tensor.UnsupportedOperatorException, fake_tensor.UnsupportedFakeTensorException)


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor) or id(tensor)  # oneDNN's tensors have no storage


@dataclass
class _Call:
    """A function of torch that the model called, and what was seen inside of it."""

    name: str = ""
    dtype: torch.dtype | None = None  # of autocast, None where it is off
    casts: bool = False  # whether it is a cast of the model's own, or has one of its own inside
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)  # of its arguments, after casts
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    given_dtype: torch.dtype | None = None  # of a recurrent layer: its input's, before casts
    products: set[torch.dtype] = field(default_factory=set)  # dtypes of matrix products inside
    copied: dict[int, int] = field(default_factory=dict)  # by storage: what it is a copy of

    def __post_init__(self) -> None:
        self.is_whole, self.is_rnn = self.name in _WHOLE, self.name in _RNNS

    def inserts_cast(self, source: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether a change of dtype during this call is autocast's."""
        if self.casts or self.dtype is None or not source.is_floating_point():
            return False
        if not self.is_whole:
            return result.dtype in (self.dtype, torch.float32)
        # Inside of it only the cast of an argument is autocast's, and for each step of a recurrent
        # layer only the first.
        wanted = self.dtype if self.is_rnn or self.name == ATTENTION else torch.float32
        key = self.key(source)
        if key not in self.dtypes or result.dtype != wanted:
            return False
        is_first = self.dtypes[key] == source.dtype
        self.dtypes[key] = result.dtype
        return is_first or not self.is_rnn

    def see_inside(self, name: str, args: tuple, out: torch.Tensor, is_product: bool) -> None:
        """Note an op inside a recurrent layer."""
        if is_product or name in _RNN_KERNELS:
            self.products.add(out.dtype)
        elif name == "clone" and self.key(args[0]) in self.dtypes:
            self.copied[_key(out)] = self.key(args[0])  # an argument, in another order

    def key(self, tensor: torch.Tensor) -> int:
        """What tells one argument from another: a recurrent layer takes its own to pieces."""
        return self.origin(tensor) if self.is_rnn else id(tensor)

    def origin(self, tensor: torch.Tensor) -> int:
        """The storage of a tensor, or of what it was copied from inside this call."""
        storage = _key(tensor)
        return self.copied.get(storage, storage)


class Tracer(TorchFunctionMode):
    """Follows one forward pass of a `run` under autocast to `dtype`; in float32 without it."""

    def __init__(self, device_type: str, dtype: torch.dtype, run: ModelRun):
        self.device_type, self.dtype = device_type, dtype
        self._run, self._backend = run, backend(device_type)
        self.rows: list[OpRecord] = []
        self.casts: list[Cast] = []
        self.bounces: list[tuple[OpRecord, str]] = []  # widened; cast back for which function
        self.mixed: dict[MixedCall, list[str]] = {}  # of ops that are not torch's: where
        self.outputs: Outputs = {}
        self.loss_dtype: torch.dtype | None = None
        self.classes = {name: type(module).__name__ for name, module in run.model.named_modules()}
        self.error: Exception | None = None  # of the model or the loss: the rows end there
        self.decisions = ""  # what to say of those that it took of a real run
        self.without_gradient = ""  # what torch says of an op that has no backward pass
        self.backward_not_followed = ""  # of an `autograd.Function`, and why not
        self.failed_at: tuple[str, str] | None = None  # module and op of the error
        self.failed_on: tuple[Operand, ...] = ()  # what that op got
        self._in_loss = False
        self.module_calls = ModuleCalls()
        self._running = RunningModule()
        self._calls: list[_Call] = []
        self._names: dict[int, str] = {}  # by storage: of what was there before
        self._sources = Sources()
        self._made: dict[int, OpRecord] = {}  # by storage: the op that wrote it last
        self._pending: list[Cast] = []  # for the op that comes next

    def follow(self, loss_fn: Callable | None) -> "Tracer":
        """Run model and loss, keep their error; raise `TraceError` for what fakes cannot run."""
        run = self._run
        for name, tensor in (run.parameters | run.buffers).items():
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            self._name_tensor(tensor, Kind.OWN, f"{kind} {name}")
        for path, tensor in named_tensors(dict(enumerate(run.args)) | run.kwargs, opened=True):
            self._name_tensor(tensor, Kind.INPUT, f"input {path[1:]}")
        self._sources.name_attributes(run.model)
        enabled = self.dtype is not torch.float32
        with (
            self._running.watched(run.model),
            self.module_calls.watched(run.model),
            autocast_on(self.device_type, self.dtype if enabled else None, enabled=enabled),
            self,
            _Ops(self),
        ):
            try:
                output = result = run.call()
                self.outputs = outputs_of(output)
                if loss_fn is not None:
                    self._in_loss = True
                    result = loss = loss_fn(output)
                    self.loss_dtype = loss.dtype if isinstance(loss, torch.Tensor) else None
            except NEEDS_VALUES as error:
                said = f"{self._failed_op} depends on values"
                raise ValuesNeeded(said, error.func) from error
            except _NOT_FAKED as error:
                cure = f"{remedy_for(error, run.model, 'X-ray')}; or {FOR_REAL.text}"
                said = f"{self._failed_op}: torch cannot run it on fake tensors; {cure}"
                raise TraceError(said) from error
            except NotAnswered:
                raise
            except Exception as error:  # whatever the model raises: `xray` says it, or raises it
                if run.is_fake and needs_memory(error):
                    said = f"{self._failed_op} reads the memory of a tensor"
                    raise MemoryNeeded(said) from error
                self.error = error
                return self
        if run.is_fake:
            self._try_backward(result)
        return self

    def _name_tensor(self, tensor: torch.Tensor, kind: Kind, text: str) -> None:
        """Name a tensor that is there before the model runs."""
        self._names.setdefault(_key(tensor), text)
        self._sources.name(tensor, kind, text)

    def _try_backward(self, result: object) -> None:
        """Run the backward pass too if the model has an `autograd.Function` of its own in it.

        Only there may it fail alone: torch's own functions compute in what they computed in before.
        """
        seeds = seeds_of(result)
        own = functions_of_the_model(seeds)
        if not own:
            return
        place = "", f"backward pass of {listed(own, 3)}"
        try:
            run_backward(seeds)
        except NEEDS_VALUES as error:
            self.failed_at = place
            raise ValuesNeeded(f"the {place[1]} depends on values", error.func) from error
        except NotAnswered:
            raise
        except RuntimeError as error:
            if lacks_formula(error):
                self.without_gradient = first_line(error)
                return
            why = _why_not_followed(error)
            if why:
                self.backward_not_followed = f"the {place[1]} {why}"
                return
            self.error, self.failed_at = error, place

    @property
    def is_frozen(self) -> bool:
        """Whether the model has parameters, and none of them requires a gradient."""
        parameters = self._run.parameters.values()
        return bool(parameters) and not any(p.requires_grad for p in parameters)

    @property
    def _failed_op(self) -> str:
        module, op = self.failed_at or (self._module, "an op")
        return f"op {op} in {place_of(module)}"

    @property
    def _module(self) -> str:
        """The module whose code is running."""
        return LOSS if self._in_loss else self._running.name

    # Functions

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute is read
            return func(*args, **kwargs)
        if self._in_loss and self._run.is_fake:
            # The loss brings targets and weights of its own, which are real.
            args, kwargs = tree_map_only(
                torch.Tensor,
                lambda t: t if isinstance(t, fake_tensor.FakeTensor) else self._run.fake(t),
                (args, kwargs),
            )
        enabled = torch.is_autocast_enabled(self.device_type)
        dtype = torch.get_autocast_dtype(self.device_type) if enabled else None
        casts = self._casts_itself(name, (*args, *kwargs.values()))
        call = _Call(_PLAIN_NAMES.get(name, name), dtype, casts=casts)
        self._calls.append(call)
        try:
            return self._run_call(call, func, args, kwargs)
        except Exception:
            self.note_failure(call.name, (args, kwargs))
            raise
        finally:
            self._calls.pop()
            self._pending = []

    def _casts_itself(self, name: str, given: tuple) -> bool:
        """Whether a cast inside of a function is not autocast's."""
        if name in _CASTING or any(isinstance(value, torch.dtype) for value in given):
            return True
        if name not in NORMS:
            return False
        # One that autocast on this backend leaves alone may compute in fp32 inside all the same.
        key, ops = f"Autocast{self._backend.key}", (name, *_MADE_OF.get(name, ()))
        known = [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key) for op in ops]
        return not any(known)

    def _attention_inside(self, *args, **kwargs) -> object:
        return self.__torch_function__(_SDPA, (), args, kwargs)

    def _run_call(self, call: _Call, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func is F.multi_head_attention_forward:
            # Modes are off inside of it, so that its attention has to be sent here.
            with attribute_set(F, ATTENTION, self._attention_inside):
                return func(*args, **kwargs)
        if not call.is_whole:
            return func(*args, **kwargs)
        # It is one row, whatever it does inside.
        is_fake, ins, count = self._run.is_fake, tensors_in((args, kwargs)), 0
        call.dtypes = {call.key(t): t.dtype for t in ins}
        call.shapes = {call.key(t): tuple(t.shape) for t in ins}
        if call.name == ATTENTION:
            count = Attention(*args, **kwargs).flops()
        elif call.is_rnn:
            count = self._rnn_flops(ins)
            call.given_dtype = ins[0].dtype
        alone = is_fake and call.name in RNN_LAYERS
        out = self._rnn(call, func, args) if alone else func(*args, **kwargs)
        if is_fake and call.name == ATTENTION and not self._backend.is_host and out.dim() == 4:
            # In memory as the kernels of real devices leave it: (B, T, H, D).
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        self._note(call, call.name, ins, tensors_in(out), count)
        return out

    def _rnn(self, call: _Call, func: Callable, args: tuple) -> Any:
        """A recurrent layer over the first of its steps alone: the others do the same."""
        if call.name in self._backend.rnns_without_rule:
            call.dtype = None
        elif call.dtype is not None:  # fake tensors do not reach the kernel that casts to it
            call.dtype = self._backend.fused_rnn_dtype or call.dtype
        steps, time = args[0], 1 if args[-1] else 0  # (T, B, C), or (B, T, C) if batch_first
        packed = isinstance(args[1 if call.name == "lstm" else 2], torch.Tensor)
        if not packed:
            args = (steps.narrow(time, 0, 1), *args[1:])
        with autocast_on(self.device_type, call.dtype, enabled=call.dtype is not None):
            out, *states = func(*args)
        if not packed:
            out = out.expand(*steps.shape[:2], out.shape[-1]).contiguous()
        return (out, *states)

    def _rnn_flops(self, ins: list[torch.Tensor]) -> int:
        """Of a recurrent layer: every weight meets every item of the batch once in each step."""
        steps = math.prod(ins[0].shape[:-1])
        matrices = [t for t in ins[1:] if t.dim() == 2]  # among them states, which are no weights
        weights = [t for t in matrices if self._names.get(_key(t), "").startswith("parameter ")]
        return sum(2 * steps * weight.numel() for weight in weights)

    # Ops

    def note_failure(self, op: str, given: object) -> None:
        """Remember where an error arose, and on what: the innermost op is the first to say so."""
        if self.failed_at is None:
            self.failed_at = self._module, op
            self.failed_on = self._sources.operands(tensors_in(given))

    def note_mixed(self, func: OpOverload, args: tuple, kwargs: dict) -> None:
        """Note a call with mixed dtypes of an op that autocast is to cast for, and does not know.

        What is torch's own raises if it cannot take them.
        """
        is_under_autocast = bool(self._calls) and self._calls[-1].dtype is not None
        if func.namespace == "aten" or not is_under_autocast:
            return
        call = mixed_call(func, args, kwargs)
        key = f"Autocast{self._backend.key}"
        if call is None or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return
        modules = self.mixed.setdefault(call, [])
        if self._module not in modules:
            modules.append(self._module)

    def see(self, func: OpOverload, args: tuple, kwargs: dict, out: object) -> None:
        """Note what an op did; runs below autograd and autocast."""
        outs = tensors_in(out)
        if not outs or computes_nothing(func):
            return
        name = _name(func)
        call = self._calls[-1] if self._calls else _Call()
        made_by = f"output of {call.name or name} in {place_of(self._module)}"
        self._sources.note(tensors_in((args, kwargs)), outs, made_by)
        changes_dtype = name == "_to_copy" and args[0].dtype != outs[0].dtype
        if changes_dtype and call.inserts_cast(args[0], outs[0]):
            self._note_cast(call, args[0], outs[0])
            return
        count = flops(func, args, kwargs, out)
        if not call.is_whole:
            self._note(call, name, tensors_in((args, kwargs)), outs, count)
        elif call.is_rnn:
            call.see_inside(name, args, outs[0], is_product=count > 0)

    def _note(self, call: _Call, name: str, ins: list, outs: list, count: int) -> None:
        """Add a row for an op, or for a call that is one row as a whole."""
        row = OpRecord(
            module=self._module,
            op=name,
            in_dtypes=tuple(call.dtypes.get(call.key(t), t.dtype) for t in ins),
            out_dtypes=tuple(t.dtype for t in outs),
            in_shapes=tuple(tuple(t.shape) for t in ins),
            out_shapes=tuple(tuple(t.shape) for t in outs),
            called=call.name or name,
            flops=count,
            autocast=call.dtype is not None,
            widened=self._is_widened(call, name, ins, outs),
            product_dtype=widest(call.products),
            given_dtype=call.given_dtype,
        )
        self.rows.append(row)
        self._pending = []
        self._made |= {_key(tensor): row for tensor in outs}

    def _is_widened(self, call: _Call, name: str, ins: list, outs: list) -> bool:
        # Autocast may insert no cast, but have a softmax itself compute and return fp32.
        changes = [(cast.from_dtype, cast.to_dtype) for cast in self._pending]
        if name in ("_softmax", "_log_softmax") and call.dtype and not call.casts:
            changes.append((ins[0].dtype, outs[0].dtype))
        return any(old in LOWER_DTYPES and new not in LOWER_DTYPES for old, new in changes)

    def _note_cast(self, call: _Call, source: torch.Tensor, result: torch.Tensor) -> None:
        storage = call.origin(source)
        row = self._made.get(storage)
        made_in = f"output of {row.called} in" if row else "a tensor made in"
        made_in += " " + place_of(row.module if row else self._module)
        cast = Cast(
            module=self._module,
            from_dtype=source.dtype,
            to_dtype=result.dtype,
            what=self._names.get(storage, made_in),
            cached=self._is_cached(call, source, result),
            shape=call.shapes.get(call.key(source), tuple(source.shape)),
            called=call.name,
            of_integers=row is not None and _gives_integers(row),
        )
        self.casts.append(cast)
        self._pending.append(cast)
        if row is not None:
            self._made[_key(result)] = row  # so that a cast of this cast is still one of the output
            narrows = result.dtype in LOWER_DTYPES and source.dtype not in LOWER_DTYPES
            if row.widened and narrows:
                self.bounces.append((row, call.name))

    def _is_cached(self, call: _Call, source: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether autocast keeps a cast, by the rule of cached_cast in ATen/autocast_mode.cpp."""
        # A library that takes the weights as one flat copy goes past the cache.
        flat = call.name in RNN_LAYERS and self._backend.fused_rnn_dtype is not None
        return (
            source.dtype is torch.float32
            and not flat
            and result.dtype is call.dtype
            and source.requires_grad
            and source.is_leaf
            and not source._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        )


def _why_not_followed(error: Exception) -> str:
    """Why fake tensors cannot follow code that they run to this error; empty if the code fails."""
    if isinstance(error, _NOT_FAKED):
        return "calls an op that torch cannot run on fake tensors"
    return (
        "reads the memory of a tensor, which fake ones do not have" if needs_memory(error) else ""
    )


def _gives_integers(row: OpRecord) -> bool:
    """Whether an op makes floating-point numbers of integers, by a cast or as ``arange`` does."""
    if row.op == "arange":
        return True
    return row.op == "_to_copy" and row.in_dtypes[0] in _INTEGERS


def _name(func: OpOverload) -> str:
    return func._schema.name.rpartition("::")[2]


class _Ops(PlainOpsMode):
    """Shows the tracer each op."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self._tracer = tracer

    def run_op(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._tracer.note_mixed(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except Exception:
            self._tracer.note_failure(_name(func), (args, kwargs))
            raise
        self._tracer.see(func, args, kwargs, out)
        return out
