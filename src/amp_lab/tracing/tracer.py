"""Follow a model through one forward pass and note each op and each cast that autocast inserts.

Two modes look on. `Tracer` sits above autocast and sees which function of torch the model calls;
`_Ops` sits below it and shows it the ops that the call becomes, with the dtypes they really get.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from amp_lab.core.backends import backend
from amp_lab.core.errors import TraceError, first_line
from amp_lab.core.report import listed
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
from amp_lab.tracing.ops_seen import (
    LOWER_DTYPES,
    computes_nothing,
    flops,
    has_autocast_rule,
    tensor_key,
    tensors_in,
)
from amp_lab.tracing.records import LOSS, RNN_LAYERS, Cast, OpRecord, place_of, widest
from amp_lab.tracing.running_module import ModuleCalls, Outputs, RunningModule, outputs_of
from amp_lab.tracing.structures import named_tensors
from amp_lab.tracing.torch_call import NORMS, TorchCall

_MADE_OF = {"instance_norm": ("batch_norm",)}
_INTEGERS = {torch.int16, torch.int32, torch.int64}
# A cast inside one of these was asked for by the model, not inserted by autocast.
_CASTING = {
    "to", "half", "float", "double", "bfloat16", "type", "type_as", "_to_copy", "copy_",
    "tensor", "as_tensor", "asarray",
}  # fmt: skip
_SDPA = F.scaled_dot_product_attention
_PLAIN_NAMES = {"__matmul__": "matmul", "__rmatmul__": "matmul"}
_NOT_FAKED = (fake_tensor.UnsupportedOperatorException, fake_tensor.UnsupportedFakeTensorException)


class Tracer(TorchFunctionMode):
    """Follows one forward pass of a `run` under autocast to `dtype`; in float32 without it."""

    def __init__(self, device_type: str, dtype: torch.dtype, run: ModelRun):
        self.device_type = device_type
        self.dtype = dtype
        self._run = run
        self._backend = backend(device_type)
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
        self._calls: list[TorchCall] = []
        self._names: dict[int, str] = {}  # by storage: of what was there before
        self._sources = Sources()
        self._written_by: dict[int, OpRecord] = {}  # by storage: the op that wrote it last
        self._pending: list[Cast] = []  # for the op that comes next

    def follow(self, loss_fn: Callable | None) -> "Tracer":
        """Run model and loss, keep their error; raise `TraceError` for what fakes cannot run."""
        self._name_tensors()
        model = self._run.model
        autocast_dtype = None if self.dtype is torch.float32 else self.dtype
        with (
            self._running.watched(model),
            self.module_calls.watched(model),
            autocast_on(self.device_type, autocast_dtype, enabled=autocast_dtype is not None),
            self,
            _Ops(self),
        ):
            try:
                result = self._run_model(loss_fn)
            except NotAnswered:
                raise
            except Exception as error:  # whatever the model raises: `xray` says it, or raises it
                limit = self._limit_of_fakes(error)
                if limit is not None:
                    raise limit from error
                self.error = error
                return self
        if self._run.is_fake:
            self._try_backward(result)
        return self

    def _name_tensors(self) -> None:
        """Name what is there before the model runs."""
        run = self._run
        for name, tensor in (run.parameters | run.buffers).items():
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            self._name_tensor(tensor, Kind.OWN, f"{kind} {name}")
        given = dict(enumerate(run.args)) | run.kwargs
        for path, tensor in named_tensors(given, open_objects=True):
            self._name_tensor(tensor, Kind.INPUT, f"input {path[1:]}")
        self._sources.name_attributes(run.model)

    def _name_tensor(self, tensor: torch.Tensor, kind: Kind, text: str) -> None:
        self._names.setdefault(tensor_key(tensor), text)
        self._sources.name(tensor, kind, text)

    def _run_model(self, loss_fn: Callable | None) -> object:
        """The loss, or the output of the model if there is no loss."""
        output = self._run.call()
        self.outputs = outputs_of(output)
        if loss_fn is None:
            return output
        self._in_loss = True
        loss = loss_fn(output)
        if isinstance(loss, torch.Tensor):
            self.loss_dtype = loss.dtype
        return loss

    def _limit_of_fakes(self, error: Exception) -> TraceError | None:
        """What to raise for an error that only fake tensors have; None if the model fails."""
        if isinstance(error, NEEDS_VALUES):
            return ValuesNeeded(f"{self._failed_op} depends on values", error.func)
        if isinstance(error, _NOT_FAKED):
            cure = f"{remedy_for(error, self._run.model, 'X-ray')}; or {FOR_REAL.text}"
            return TraceError(f"{self._failed_op}: torch cannot run it on fake tensors; {cure}")
        if self._run.is_fake and needs_memory(error):
            return MemoryNeeded(f"{self._failed_op} reads the memory of a tensor")
        return None

    def _try_backward(self, result: object) -> None:
        """Run the backward pass too if the model has an `autograd.Function` of its own in it.

        Only there may it fail alone: torch's own functions compute in what they computed in before.
        """
        seeds = seeds_of(result)
        own = functions_of_the_model(seeds)
        if not own:
            return
        pass_of = f"backward pass of {listed(own, 3)}"
        try:
            run_backward(seeds)
        except NEEDS_VALUES as error:
            self.failed_at = "", pass_of
            raise ValuesNeeded(f"the {pass_of} depends on values", error.func) from error
        except NotAnswered:
            raise
        except RuntimeError as error:
            if lacks_formula(error):
                self.without_gradient = first_line(error)
            elif isinstance(error, _NOT_FAKED):
                reason = "calls an op that torch cannot run on fake tensors"
                self.backward_not_followed = f"the {pass_of} {reason}"
            elif needs_memory(error):
                reason = "reads the memory of a tensor, which fake ones do not have"
                self.backward_not_followed = f"the {pass_of} {reason}"
            else:
                self.failed_at = "", pass_of
                self.error = error

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
            args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        dtype = None
        if torch.is_autocast_enabled(self.device_type):
            dtype = torch.get_autocast_dtype(self.device_type)
        casts = self._casts_itself(name, (*args, *kwargs.values()))
        call = TorchCall(_PLAIN_NAMES.get(name, name), dtype, casts)
        self._calls.append(call)
        try:
            return self._run_call(call, func, args, kwargs)
        except Exception:
            self.note_failure(call.name, (args, kwargs))
            raise
        finally:
            self._calls.pop()
            self._pending = []

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, fake_tensor.FakeTensor):
            return tensor
        return self._run.fake(tensor)

    def _casts_itself(self, name: str, given: tuple) -> bool:
        """Whether a cast inside of a function is not autocast's."""
        if name in _CASTING or any(isinstance(value, torch.dtype) for value in given):
            return True
        if name not in NORMS:
            return False
        # One that autocast on this backend leaves alone may compute in fp32 inside all the same.
        ops = (name, *_MADE_OF.get(name, ()))
        return not any(has_autocast_rule(f"aten::{op}", self.device_type) for op in ops)

    def _attention_inside(self, *args, **kwargs) -> object:
        return self.__torch_function__(_SDPA, (), args, kwargs)

    def _run_call(self, call: TorchCall, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func is F.multi_head_attention_forward:
            # Modes are off inside of it, so that its attention has to be sent here.
            with attribute_set(F, ATTENTION, self._attention_inside):
                return func(*args, **kwargs)
        if not call.is_one_row:
            return func(*args, **kwargs)
        ins = tensors_in((args, kwargs))
        call.note_arguments(ins)
        count = 0
        if call.name == ATTENTION:
            count = Attention(*args, **kwargs).flops()
        elif call.is_rnn:
            count = self._rnn_flops(ins)
            call.given_dtype = ins[0].dtype
        if self._run.is_fake and call.name in RNN_LAYERS:
            out = self._rnn(call, func, args)
        else:
            out = func(*args, **kwargs)
        if call.name == ATTENTION:
            out = self._as_in_memory(out)
        self._note(call, call.name, ins, tensors_in(out), count)
        return out

    def _as_in_memory(self, out: torch.Tensor) -> torch.Tensor:
        """What attention returns, in memory as the kernels of real devices leave it."""
        if not self._run.is_fake or self._backend.is_host or out.dim() != 4:
            return out
        return out.transpose(1, 2).contiguous().transpose(1, 2)  # (B, T, H, D) in memory

    def _rnn(self, call: TorchCall, func: Callable, args: tuple) -> Any:
        """A recurrent layer over the first of its steps alone: the others do the same."""
        if call.name in self._backend.rnns_without_rule:
            call.autocast_dtype = None
        elif (
            call.autocast_dtype is not None
        ):  # fake tensors do not reach the kernel that casts to it
            call.autocast_dtype = self._backend.fused_rnn_dtype or call.autocast_dtype
        steps = args[0]
        after_states = args[1 if call.name == "lstm" else 2]
        is_packed = isinstance(after_states, torch.Tensor)
        if not is_packed:
            is_batch_first = args[-1]
            time = 1 if is_batch_first else 0  # (B, T, C), or (T, B, C)
            args = (steps.narrow(time, 0, 1), *args[1:])
        with autocast_on(
            self.device_type, call.autocast_dtype, enabled=call.autocast_dtype is not None
        ):
            out, *states = func(*args)
        if not is_packed:
            out = out.expand(*steps.shape[:2], out.shape[-1]).contiguous()
        return (out, *states)

    def _rnn_flops(self, ins: list[torch.Tensor]) -> int:
        """Of a recurrent layer: every weight meets every item of the batch once in each step."""
        weights = 0
        for tensor in ins[1:]:
            # A state may be a matrix too.
            is_parameter = self._names.get(tensor_key(tensor), "").startswith("parameter ")
            if tensor.dim() == 2 and is_parameter:
                weights += tensor.numel()
        steps = math.prod(ins[0].shape[:-1])
        return 2 * steps * weights

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
        if func.namespace == "aten" or not self._calls:
            return
        if self._calls[-1].autocast_dtype is None:  # autocast is off
            return
        call = mixed_call(func, args, kwargs)
        if call is None or has_autocast_rule(func.name(), self.device_type):
            return
        modules = self.mixed.setdefault(call, [])
        if self._module not in modules:
            modules.append(self._module)

    def note_op(self, func: OpOverload, args: tuple, kwargs: dict, out: object) -> None:
        """Note what an op did; runs below autograd and autocast."""
        outs = tensors_in(out)
        if not outs or computes_nothing(func):
            return
        ins = tensors_in((args, kwargs))
        name = _name(func)
        call = self._calls[-1] if self._calls else TorchCall()
        made_by = f"output of {call.name or name} in {place_of(self._module)}"
        self._sources.note_op(ins, outs, made_by)
        changes_dtype = name == "_to_copy" and args[0].dtype != outs[0].dtype
        if changes_dtype and call.inserts_cast(args[0], outs[0]):
            self._note_cast(call, args[0], outs[0])
            return
        count = flops(func, args, kwargs, out)
        if not call.is_one_row:
            self._note(call, name, ins, outs, count)
        elif call.is_rnn:
            call.note_inside(name, args, outs[0], is_product=count > 0)

    def _note(self, call: TorchCall, name: str, ins: list, outs: list, count: int) -> None:
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
            autocast=call.autocast_dtype is not None,
            widened=self._is_widened(call, name, ins, outs),
            product_dtype=widest(call.product_dtypes),
            given_dtype=call.given_dtype,
        )
        self.rows.append(row)
        self._pending = []
        for tensor in outs:
            self._written_by[tensor_key(tensor)] = row

    def _is_widened(self, call: TorchCall, name: str, ins: list, outs: list) -> bool:
        if any(_widens(cast.from_dtype, cast.to_dtype) for cast in self._pending):
            return True
        # Autocast may insert no cast, but have a softmax itself compute and return fp32.
        if (
            name not in ("_softmax", "_log_softmax")
            or call.autocast_dtype is None
            or call.casts_itself
        ):
            return False
        return _widens(ins[0].dtype, outs[0].dtype)

    def _note_cast(self, call: TorchCall, source: torch.Tensor, result: torch.Tensor) -> None:
        storage = call.origin(source)
        row = self._written_by.get(storage)
        if row is None:
            made_in = f"a tensor made in {place_of(self._module)}"
        else:
            made_in = f"output of {row.called} in {place_of(row.module)}"
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
        if row is None:
            return
        # So that a cast of this cast is still one of the output.
        self._written_by[tensor_key(result)] = row
        narrows = result.dtype in LOWER_DTYPES and source.dtype not in LOWER_DTYPES
        if row.widened and narrows:
            self.bounces.append((row, call.name))

    def _is_cached(self, call: TorchCall, source: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether autocast keeps a cast, by the rule of cached_cast in ATen/autocast_mode.cpp."""
        if call.name in RNN_LAYERS and self._backend.fused_rnn_dtype is not None:
            return False  # a library that takes the weights as one flat copy goes past the cache
        if source.dtype is not torch.float32 or result.dtype is not call.autocast_dtype:
            return False
        if not source.requires_grad or not source.is_leaf or source._is_view():
            return False
        return torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()


def _widens(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a change of dtype leads out of 16 bits."""
    return before in LOWER_DTYPES and after not in LOWER_DTYPES


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
        self._tracer.note_op(func, args, kwargs, out)
        return out
