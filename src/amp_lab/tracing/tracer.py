"""Follow a model through one forward pass and note each op and each cast that autocast inserts.

Two modes record the pass. `Tracer` runs above autocast and gets the torch functions that the model
calls. `_Ops` runs below autocast and passes the ops of each call to the tracer, with the dtypes of
their inputs. Both write to an `OpLog`.
"""

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
from amp_lab.core.tensors import named_tensors, tensor_key, tensors_in
from amp_lab.tracing.attention import ATTENTION, FLEX_ATTENTION, Attention
from amp_lab.tracing.attributes import attribute_set
from amp_lab.tracing.backward import (
    functions_of_the_model,
    lacks_formula,
    run_backward,
    seeds_of,
)
from amp_lab.tracing.decisions import MemoryNeeded, NotAnswered, ValuesNeeded
from amp_lab.tracing.error_tips import NO_FAKE, op_without_fake
from amp_lab.tracing.fake_device import (
    FOR_REAL,
    NEEDS_VALUES,
    ModelRun,
    PlainOpsMode,
    autocast_on,
    needs_memory,
    remedy_for,
)
from amp_lab.tracing.op_log import OpLog
from amp_lab.tracing.operands import MixedCall, Operand, SourceKind, Sources, mixed_call
from amp_lab.tracing.ops_seen import (
    computes_nothing,
    flops,
    has_autocast_rule,
    has_unknown_work,
    op_name,
    plain_arguments,
    plain_values,
)
from amp_lab.tracing.records import LOSS, RNN_LAYERS, place_of
from amp_lab.tracing.rnn_calls import rnn_autocast_dtype, rnn_flops, run_first_step
from amp_lab.tracing.running_module import ModuleCalls, Outputs, RunningModule, outputs_of
from amp_lab.tracing.torch_call import NORMS, TorchCall

# Norms that call another op, whose autocast rule then applies.
_CALLED_INSIDE = {"instance_norm": ("batch_norm",)}
# A cast inside one of these functions is the model's, not autocast's.
_CASTING_FUNCTIONS = {
    "to", "half", "float", "double", "bfloat16", "type", "type_as", "_to_copy", "copy_",
    "tensor", "as_tensor", "asarray",
}  # fmt: skip
_ORIGINAL_ATTENTION = F.scaled_dot_product_attention  # before `attribute_set` replaces it
_PLAIN_NAMES = {"__matmul__": "matmul", "__rmatmul__": "matmul"}
_NO_FAKE_RULE = (
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)


class Tracer(TorchFunctionMode):
    """Follows one forward pass of a `run` under autocast to `dtype`; float32 turns autocast off."""

    def __init__(self, device_type: str, dtype: torch.dtype, run: ModelRun):
        self.device_type = device_type
        self.dtype = dtype
        self._run = run
        self._backend = backend(device_type)
        self._log = OpLog(device_type)
        self.rows = self._log.rows
        self.casts = self._log.casts
        self.bounces = self._log.bounces
        # Calls with mixed dtypes of ops that are not torch's, each with the modules that make it.
        self.mixed: dict[MixedCall, dict[str, None]] = {}
        # Ops whose FLOPs nobody knows, such as ``mine::op``, each with the modules that call it.
        self.unknown_work: dict[str, dict[str, None]] = {}
        self.outputs: Outputs = {}
        self.loss_dtype: torch.dtype | None = None
        self.error: Exception | None = None  # of the model or the loss: the rows end there
        # A sentence, if ops that depend on values got the results that they had in a real run.
        self.decisions = ""
        self.without_gradient = ""  # torch's error for an op that has no backward pass
        # Why the backward pass of an `autograd.Function` was not followed, in a sentence.
        self.backward_not_followed = ""
        self.failed_at: tuple[str, str] | None = None  # names of the module and op of the error
        self.failed_on: tuple[Operand, ...] = ()  # the operands of that op
        self._in_loss = False
        self.module_calls = ModuleCalls()
        self._running = RunningModule()
        self._calls: list[TorchCall] = []  # calls that are running, the innermost last
        self._sources = Sources()

    def follow(self) -> "Tracer":
        """Run the model and the loss, keep the error if one of them fails, and return this tracer.

        On fake tensors the backward pass is tried too, see `_try_backward`. Raises `TraceError` for
        code that runs, but not on fake tensors.
        """
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
                result = self._run_model()
            except NotAnswered:  # the results of a real run do not fit: not an error of the model
                raise
            except Exception as error:  # a model may raise anything: `xray` reports or raises it
                fake_error = self._error_of_fakes(error)
                if fake_error is not None:
                    raise fake_error from error
                self.error = error
                return self
        if self._run.is_fake:
            self._try_backward(result)
        return self

    def _name_tensors(self) -> None:
        """Name the tensors that are there before the model runs."""
        run = self._run
        for name, tensor in (run.parameters | run.buffers).items():
            noun = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            self._name_tensor(tensor, SourceKind.OWN, f"{noun} {name}")
        inputs = dict(enumerate(run.call.args)) | run.call.kwargs
        for path, tensor in named_tensors(inputs, open_objects=True):
            path_without_dot = path[1:]  # ``0`` or ``image`` of ``.0`` or ``.image``
            self._name_tensor(tensor, SourceKind.INPUT, f"input {path_without_dot}")
        self._sources.name_attributes(run.model)

    def _name_tensor(self, tensor: torch.Tensor, kind: SourceKind, text: str) -> None:
        self._log.names.setdefault(tensor_key(tensor), text)
        self._sources.name(tensor, kind, text)

    def _run_model(self) -> object:
        """Run the model; return the loss, or the output if there is no loss."""
        output = self._run.output()
        self.outputs = outputs_of(output)
        loss_fn = self._run.call.loss_fn
        if loss_fn is None:
            return output
        self._in_loss = True
        loss = loss_fn(output)
        if isinstance(loss, torch.Tensor):
            self.loss_dtype = loss.dtype
        return loss

    def _error_of_fakes(self, error: Exception) -> TraceError | None:
        """The error to raise if only fake tensors fail here; None if the model itself does."""
        if isinstance(error, NEEDS_VALUES):
            return ValuesNeeded(f"{self._failed_op} depends on values", error.func)
        without_fake = op_without_fake(error)
        if without_fake:
            cure = f"{NO_FAKE.sentence(op=without_fake)}; or {FOR_REAL.text}"
            return TraceError(f"{self._failed_op} has no fake implementation: {cure}")
        if isinstance(error, _NO_FAKE_RULE):
            cure = f"{remedy_for(error, self._run.model, 'X-ray')}; or {FOR_REAL.text}"
            return TraceError(
                f"{self._failed_op}: torch cannot run this op on fake tensors; {cure}"
            )
        if self._run.is_fake and needs_memory(error):
            return MemoryNeeded(f"{self._failed_op} reads the memory of a tensor")
        return None

    def _try_backward(self, result: object) -> None:
        """Run the backward pass too, if the model has an `autograd.Function` of its own.

        Without one, the backward pass does not fail under autocast if the forward pass did not:
        torch's own functions compute it in the dtypes of the forward pass. An exception is
        `linalg.pinv`, whose matmul autocast casts. If it fails, one of the attributes
        `without_gradient`, `backward_not_followed` and `error` says why. Raises `ValuesNeeded` if
        it asks for values.
        """
        seeds = seeds_of(result)
        functions = functions_of_the_model(seeds)
        if not functions:
            return
        backward_pass = f"backward pass of {listed(functions, 3)}"
        try:
            run_backward(seeds)
        except NEEDS_VALUES as error:
            self.failed_at = "", backward_pass
            raise ValuesNeeded(f"the {backward_pass} depends on values", error.func) from error
        except NotAnswered:
            raise
        except RuntimeError as error:
            if lacks_formula(error):
                self.without_gradient = first_line(error)
            elif isinstance(error, _NO_FAKE_RULE):
                reason = "calls an op that torch cannot run on fake tensors"
                self.backward_not_followed = f"the {backward_pass} {reason}"
            elif needs_memory(error):
                reason = "reads the memory of a tensor, but fake tensors have no memory"
                self.backward_not_followed = f"the {backward_pass} {reason}"
            else:
                self.failed_at = "", backward_pass
                self.error = error

    @property
    def is_frozen(self) -> bool:
        """Whether the model has parameters, and none of them requires a gradient."""
        parameters = self._run.parameters.values()
        return bool(parameters) and not any(p.requires_grad for p in parameters)

    @property
    def _failed_op(self) -> str:
        """The op that failed, for a sentence: ``op aten.mm in 'head'``; ``an op`` if not known."""
        module, op = self.failed_at or (self._module, "an op")
        return f"op {op} in {place_of(module)}"

    @property
    def _module(self) -> str:
        """The name of the module whose code is running, or `LOSS`."""
        return LOSS if self._in_loss else self._running.name

    # Functions of torch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run a function of torch as the innermost of `_calls`, to which its ops then belong."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # the model reads an attribute of a tensor
            return func(*args, **kwargs)
        if self._in_loss and self._run.is_fake:
            # The targets and weights of a loss are real tensors, so they are made fake here.
            args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        autocast_dtype = None
        if torch.is_autocast_enabled(self.device_type):
            autocast_dtype = torch.get_autocast_dtype(self.device_type)
        casts_itself = self._casts_itself(name, (*args, *kwargs.values()))
        call = TorchCall(_PLAIN_NAMES.get(name, name), autocast_dtype, casts_itself)
        self._calls.append(call)
        try:
            return self._run_call(call, func, args, kwargs)
        except Exception:
            self.note_failure(call.name, (args, kwargs))
            raise
        finally:
            self._calls.pop()
            self._log.end_call()

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same shape and dtype; a fake one as it is."""
        if isinstance(tensor, fake_tensor.FakeTensor):
            return tensor
        return self._run.fake(tensor)

    def _casts_itself(self, name: str, arguments: tuple) -> bool:
        """Whether casts inside of a function are the model's or the function's, not autocast's.

        `name` is the name of the function.
        """
        if name in _CASTING_FUNCTIONS:
            return True
        if any(isinstance(value, torch.dtype) for value in arguments):
            return True
        if name not in NORMS:
            return False
        # A norm for which autocast has no rule on this backend may itself compute in fp32.
        ops = (name, *_CALLED_INSIDE.get(name, ()))
        return not any(has_autocast_rule(f"aten::{op}", self.device_type) for op in ops)

    def _attention_inside(self, *args, **kwargs) -> object:
        """Trace a call of `scaled_dot_product_attention` by multi-head attention.

        `_run_call` puts this in place of that function.
        """
        return self.__torch_function__(_ORIGINAL_ATTENTION, (), args, kwargs)

    def _run_call(self, call: TorchCall, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function of torch, and add its rows; return its result.

        Most functions have a row for each op that they run, which `note_op` adds.
        """
        if func is F.multi_head_attention_forward:
            # torch turns this mode off inside of that function, so its attention is replaced.
            with attribute_set(F, ATTENTION, self._attention_inside):
                return func(*args, **kwargs)
        if call.is_one_row:
            return self._run_as_one_row(call, func, args, kwargs)
        return func(*args, **kwargs)

    def _run_as_one_row(self, call: TorchCall, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run attention, a norm or a recurrent layer, and add one row for all of its ops."""
        ins = tensors_in((args, kwargs))
        call.note_arguments(ins)
        flop_count = 0
        if call.name == ATTENTION:
            flop_count = Attention(*args, **kwargs).flops()
        elif call.name == FLEX_ATTENTION:
            query, key, value = args[:3]
            flop_count = Attention(query, key, value).flops()
        elif call.is_rnn:
            flop_count = rnn_flops(ins, self._log.names)
            call.given_dtype = ins[0].dtype
        if call.name in RNN_LAYERS:
            call.autocast_dtype = rnn_autocast_dtype(call, self.device_type)
        if self._run.is_fake and call.name in RNN_LAYERS:
            out = run_first_step(call, func, args, self.device_type)
        else:
            out = func(*args, **kwargs)
        outs = tensors_in(out)
        if call.name == FLEX_ATTENTION:  # query, key and value; no statistics of the scores
            ins = ins[:3]
            outs = outs[:1]
        arguments = plain_values(kwargs)
        self._log.add_row(self._module, call, call.name, ins, outs, flop_count, arguments)
        return out

    # Ops that a function runs

    def note_failure(self, op: str, arguments: object) -> None:
        """Note where an error was raised, if the op that raised it has not done so already.

        `op` is the name of an op or function, and `arguments` are its (args, kwargs).
        """
        if self.failed_at is None:
            self.failed_at = (self._module, op)
            self.failed_on = self._sources.operands(tensors_in(arguments))

    def note_mixed(self, func: OpOverload, args: tuple, kwargs: dict) -> None:
        """Note a call of a custom op that gets several dtypes, since autocast has no rule for it.

        Only under autocast. Ops of torch are left out: they raise an error if they cannot take
        mixed dtypes.
        """
        if func.namespace == "aten" or not self._calls:
            return
        if self._calls[-1].autocast_dtype is None:  # autocast is off
            return
        call = mixed_call(func, args, kwargs)
        if call is None or has_autocast_rule(func.name(), self.device_type):
            return
        self.mixed.setdefault(call, {})[self._module] = None

    def note_op(self, func: OpOverload, args: tuple, kwargs: dict, out: object) -> None:
        """Note an op that ran, with its result `out`: as a cast of autocast, or as a row.

        The op ran below autograd and autocast. If a call is one row as a whole, the ops inside add
        no rows.
        """
        outs = tensors_in(out)
        if not outs or computes_nothing(func):
            return
        ins = tensors_in((args, kwargs))
        name = op_name(func)
        call = self._calls[-1] if self._calls else TorchCall()
        output_text = f"output of {call.name or name} in {place_of(self._module)}"
        self._sources.note_op(ins, outs, output_text)
        source = _copied(name, call, ins)
        result = outs[0]
        if source is not None and source.dtype != result.dtype and call.note_cast(source, result):
            self._log.add_cast(self._module, call, source, result)
            return
        flop_count = flops(func, args, kwargs, out)
        if has_unknown_work(func, outs):
            self.unknown_work.setdefault(func._schema.name, {})[self._module] = None
        if not call.is_one_row:
            arguments = plain_arguments(func, args, kwargs)
            self._log.add_row(self._module, call, name, ins, outs, flop_count, arguments)
        elif call.is_rnn:
            call.note_rnn_op(name, args, outs[0], is_matmul=flop_count > 0)


def _copied(name: str, call: TorchCall, ins: list[torch.Tensor]) -> torch.Tensor | None:
    """The input that an op copies, maybe into another dtype; None for an op that does not copy."""
    if name == "_to_copy" and ins:  # under vmap, the copy may be of a plain number
        return ins[0]
    if name == "copy_" and call.is_rnn:  # cuDNN's flat copy of the weights: (target, weight)
        return ins[1]
    return None


class _Ops(PlainOpsMode):
    """The mode that shows a tracer each op: before it runs, if it fails, and with its result."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self._tracer = tracer

    def run_op(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an op, show it to the tracer, and return its result."""
        self._tracer.note_mixed(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except Exception:
            self._tracer.note_failure(op_name(func), (args, kwargs))
            raise
        self._tracer.note_op(func, args, kwargs, out)
        return out
