"""Trace one training step on fake tensors, and forecast its memory from the trace."""

import dataclasses
import gc
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

from amp_lab.core.backends import Backend, backend
from amp_lab.core.errors import AmpLabError, TraceError, first_line
from amp_lab.core.optimizers import OPTIMIZERS
from amp_lab.core.precision import Precision
from amp_lab.core.report import listed, short_name
from amp_lab.core.tensors import LOWER_DTYPES, named_tensors
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
from amp_lab.tracing.optimizer_state import Parameter, optimizer_bytes
from amp_lab.tracing.records import RNN_LAYERS
from amp_lab.tracing.storage_ledger import StorageLedger, StorageTrace

_MOST_RANKS = 1024
_RNN_CAVEAT = ": forecast with torch's own kernels; cuDNN or oneDNN may keep twice as much."

# In the error of fake tensors for an op that gets tensors of two devices.
_MIXED_DEVICES = "to be on the same device"

_Result = TypeVar("_Result")
LossFunction = Callable[[Any], torch.Tensor]


def traced_on_either(trace: Callable[[], _Result]) -> _Result:
    """Call `trace`; if its ops mix devices, call it again with the CPU as the default device.

    Some models need tensors that are made without a device to be on the CPU. One is torchvision's
    SSD, which computes boxes from such tensors and from sizes that it holds. If both calls mix
    devices, the first error is raised.
    """
    try:
        return trace()
    except TraceError as error:
        if _MIXED_DEVICES not in str(error):
            raise
        first_error = error
    try:
        with torch.device("cpu"):
            return trace()
    except TraceError as error:
        if _MIXED_DEVICES in str(error):
            raise first_error from first_error.__cause__
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
    """The block in which training steps can be traced, one for each precision.

    With `fsdp_ranks` above 1 they are those of one rank of FSDP2. Entering the block takes as long
    as half a trace. Raises `TraceError` for an unknown optimizer or precision, too many ranks and
    what is no model; `DeviceError` for an unknown device type.
    """
    if optimizer not in OPTIMIZERS:
        raise TraceError(f"optimizer {optimizer!r}: give one of {', '.join(OPTIMIZERS)}")
    if not 1 <= fsdp_ranks <= _MOST_RANKS:
        raise TraceError(f"ranks {fsdp_ranks}: give 1 to {_MOST_RANKS}")
    checked_backend(device_type)
    traced_on = "cpu" if fsdp_ranks > 1 else device_type  # FSDP2 runs on fake tensors of the CPU
    with steps_on(model, traced_on, precisions) as (run, checked), torch.enable_grad():
        yield [
            TrainingStep(run, device_type, precision, optimizer, loss_fn, fsdp_ranks)
            for precision in checked
        ]


@contextmanager
def steps_on(
    model: nn.Module, device_type: str, precisions: Iterable[Precision | str]
) -> Iterator[tuple[ModelRun, list[Precision]]]:
    """The block in which a model can be traced; it gives the model and the checked precisions.

    Raises `TraceError` for what is no model, and for no precision or an unknown one; `DeviceError`
    for an unknown device type.
    """
    names = list(precisions)
    if not names:
        raise TraceError("precisions is empty; give at least one")
    require_model(model)
    for precision in names:
        if precision not in list(Precision):
            raise TraceError(f"precision {precision!r}: give one of {', '.join(Precision)}")
    checked_backend(device_type)
    with _comparable_traces(), on_fake_device(model, (), {}, device_type) as run:
        yield run, [Precision(precision) for precision in names]


@dataclass(frozen=True)
class TrainingStep:
    """A training step without its inputs; made by `training_steps`."""

    run: ModelRun  # the model on its fake device; the inputs in it are not used
    device_type: str
    precision: Precision
    optimizer: str
    loss_fn: LossFunction | None
    ranks: int = 1  # of FSDP2; 1: the model is not sharded

    @property
    def traced_on(self) -> str:
        """The type of device whose kernels run, and on which its inputs have to be."""
        return "cpu" if self.ranks > 1 else self.device_type

    def trace(
        self, inputs: tuple, kwargs: dict[str, Any], decisions: Decisions | None = None
    ) -> "TracedStep":
        """Run the step once on fake inputs, and note when each storage is made and freed.

        `decisions` are those of a real run on such inputs, if the course of the model depends on
        values. Raises `TraceError` for a step that fails or that no trace can follow.
        """

        def trace() -> TracedStep:
            with self.run.told(decisions) as replay:
                traced = self._trace(inputs, kwargs, replay)
                replay.require_done()  # the trace has to take all decisions of the real run
            return dataclasses.replace(traced, decisions=replay.remark)

        return traced_on_either(trace)

    def _trace(self, inputs: tuple, kwargs: dict[str, Any], replay: Replay) -> "TracedStep":
        """Run the step; the model's decisions are those of `replay`, which may be empty.

        Only a sharded step uses `replay` itself: it runs twice, with the same decisions.
        """
        named = named_tensors((inputs, kwargs), open_objects=True)
        input_tensors = [tensor for _, tensor in named]
        shapes = tuple(tuple(tensor.shape) for tensor in input_tensors)
        with one_line_errors(self.run.model, shapes, self.device_type):
            if self.ranks > 1:
                from amp_lab.tracing.sharded_step import trace_sharded  # FSDP2 is slow to load

                trained, storages = trace_sharded(self, inputs, kwargs, replay)
            else:
                trained, storages = self._trace_unsharded(input_tensors, inputs, kwargs)
        parameters = tuple((tuple(tensor.shape), tensor.dtype) for tensor in trained)
        return TracedStep(self, shapes, parameters, storages)

    def _trace_unsharded(
        self, input_tensors: list[torch.Tensor], inputs: tuple, kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], StorageTrace]:
        """Run the step; return the parameters that got a gradient, and what was allocated.

        `input_tensors` are the tensors in `inputs` and `kwargs`.
        """
        run = self.run
        ledger = StorageLedger(self.device_type)
        ledger.set_kind("weights", run.parameters.values())
        ledger.set_kind("buffers", run.buffers.values())
        ledger.set_kind("inputs", input_tensors)
        with (
            ledger.naming_modules(run.model),
            ledger,
            # Around the backward pass too, in which activation checkpointing calls modules again.
            _reparametrize_module(run.model, run.parameters | run.buffers),
        ):
            gradients = run_backward(self._forward(ledger, inputs, kwargs))
            # `gradients` are by the id of a leaf. So are these parameters: one with two names
            # counts once.
            trained = {id(p): p for p in run.parameters.values() if id(p) in gradients}
            self._require_known_sizes(gradients)
            ledger.set_kind("gradients", [gradients[key] for key in trained])
            ledger.mark("backward")
        return list(trained.values()), ledger.trace(activations_at="forward")

    def _require_known_sizes(self, gradients: dict[int, torch.Tensor]) -> None:
        """Raise `TraceError` for sparse gradients of unknown size, or that the optimizer refuses.

        `gradients` are by the id of the parameter.
        """
        sparse = {key: gradient for key, gradient in gradients.items() if gradient.is_sparse}
        reason = f"{self.optimizer} (not sgd) refuses them"
        if OPTIMIZERS[self.optimizer].takes_sparse:
            reason = "values decide their size"
            # Some fake gradients have no values in them and so do not show their size: a sum of
            # sparse gradients, or the gradient of an `nn.EmbeddingBag` on a CPU.
            sparse = {key: gradient for key, gradient in sparse.items() if not gradient._nnz()}
        if sparse:
            names = [name for name, p in self.run.parameters.items() if id(p) in sparse]
            raise TraceError(
                f"the gradients of {listed(names, 3)} are sparse, and {reason}: "
                "make the embedding with sparse=False"
            )

    def output(self, model: nn.Module, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the model; return the loss, or the output if there is no loss function.

        Raises `TraceError` if the loss is not a tensor of one number.
        """
        output = model(*inputs, **kwargs)
        if self.loss_fn is None:
            return output
        loss = self.loss_fn(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            # The shape of a tensor with dimensions; the class of anything else.
            returned = tuple(getattr(loss, "shape", ())) or type(loss).__name__
            raise TraceError(f"loss_fn must return one number, not {returned}")
        return loss

    def _forward(self, ledger: StorageLedger, inputs: tuple, kwargs: dict[str, Any]) -> Seeds:
        """Run the forward pass; return the tensors that the backward pass begins with.

        Marks two moments in the ledger: "cached" in the autocast block and "forward" after it.
        Raises `TraceError` if no gradient can reach the parameters.
        """
        model = self.run.model
        hooks = torch.autograd.graph.saved_tensors_hooks(
            pack_hook=ledger.note_saved, unpack_hook=lambda tensor: tensor
        )
        device = backend(self.device_type)
        # Where a library runs recurrent layers, its casts take the place of autocast's.
        rnn_casts = _CastOnce(device) if device.fused_rnn_dtype else nullcontext()
        dtype = self.precision.dtype
        autocast_dtype = None if dtype is torch.float32 else dtype
        with autocast_on(self.device_type, autocast_dtype, enabled=autocast_dtype is not None):
            with hooks, rnn_casts:
                output = self.output(model, inputs, kwargs)
            ledger.mark("cached")  # before the end of the block, which clears autocast's cache
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
    """A step that ran on inputs of some shapes, with the storages that it allocated."""

    step: TrainingStep
    input_shapes: tuple[tuple[int, ...], ...]
    trained: tuple[Parameter, ...]  # shape and dtype of each that got a gradient
    storages: StorageTrace
    decisions: str = ""  # a sentence, if the step took the decisions of a run on the CPU

    def forecast(self) -> MemoryForecast:
        """The forecast for this step, with an optimizer, whose memory is computed separately."""
        step = self.step
        storages = self.storages
        state, temporaries = optimizer_bytes(step.optimizer, self.trained, step.device_type)
        in_use = storages.in_use() + state  # the state is there all the time
        peak_events = self._peak_events(in_use)
        phases = {name: int(in_use[event]) for name, event in peak_events.items()}
        phases["optimizer"] += temporaries
        peak_phase = max(phases, key=phases.__getitem__)
        events_to_peak = peak_events[peak_phase] + 1  # how many: the event at the peak is the last
        at_peak = storages.by_kind(events_to_peak)
        at_peak["optimizer"] += state
        if peak_phase == "optimizer":
            at_peak["temporaries"] += temporaries
        largest = storages.largest(events_to_peak, phases[peak_phase])
        in_autocast = storages.by_kind(storages.marks["cached"])
        after_forward = storages.by_kind(storages.marks["forward"])
        after_backward = storages.by_kind(storages.marks["backward"])
        return MemoryForecast(
            model=type(step.run.model).__name__,
            input_shapes=self.input_shapes,
            device_type=step.device_type,
            precision=step.precision,
            optimizer_name=step.optimizer,
            weights=after_forward["weights"],
            buffers=after_forward["buffers"],
            gradients=after_backward["gradients"],
            optimizer=state,
            activations=after_forward["activations"],
            cast_cache=in_autocast["cast_cache"],
            cast_kept=after_forward["cast_cache"],
            phases=phases,
            at_peak=at_peak,
            caveats=tuple(self._caveats()),
            fsdp_ranks=step.ranks,
            largest_at_peak=str(largest or ""),
        )

    def _peak_events(self, in_use: np.ndarray) -> dict[str, int]:
        """For each phase the index of the event after which the most is in use.

        `in_use` has the bytes in use after each event: (events,).
        """
        forward = self.storages.marks["forward"]
        backward = self.storages.marks["backward"]
        last_of_forward = forward - 1  # the backward pass begins with what is in use after it
        return {
            "forward": int(np.argmax(in_use[:forward])),
            "backward": last_of_forward + int(np.argmax(in_use[last_of_forward:backward])),
            "optimizer": backward - 1,  # the last event: the optimizer's step is not traced
        }

    def _caveats(self) -> Iterator[str]:
        """Sentences on what the forecast may be wrong about."""
        model = self.step.run.model
        rnns = {type(m).__name__ for m in model.modules() if isinstance(m, nn.RNNBase)}
        for class_name in sorted(rnns):
            yield f"{class_name}{_RNN_CAVEAT}"
        yield from _caveat_of_low_weights(model, self.step.precision)
        if self.decisions:
            yield self.decisions


def _caveat_of_low_weights(model: nn.Module, precision: Precision) -> Iterator[str]:
    """A sentence on a step in fp32 or tf32 of a model whose weights are in 16 bits."""
    low = {short_name(p.dtype) for p in model.parameters() if p.dtype in LOWER_DTYPES}
    if low and precision in (Precision.FP32, Precision.TF32):
        names = listed(sorted(low))
        yield f"Weights in {names} stay so: {precision} is this model without autocast."


class _CastOnce(TorchFunctionMode):
    """Casts a recurrent layer's input, states and weights once, and not again in each step.

    Autocast does the same for libraries that take all weights as one flat copy, such as cuDNN
    (ATen/cudnn/AutocastRNN.cpp). Fake tensors run torch's own kernels instead, for which autocast
    casts every weight in every step.
    """

    def __init__(self, device: Backend):
        self._type = device.type
        self._dtype = device.fused_rnn_dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in RNN_LAYERS or not torch.is_autocast_enabled(self._type):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        with autocast_on(self._type, self._dtype, enabled=False):
            return func(*args, **kwargs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in fp32 cast to the library's dtype; any other as it is."""
        if tensor.dtype is not torch.float32:
            return tensor
        return tensor.to(self._dtype)


@contextmanager
def one_line_errors(model: nn.Module, shapes: tuple, device_type: str) -> Iterator[None]:
    """The block in which an error of a model becomes a `TraceError` of one line.

    `shapes` are those of its input tensors, a tuple each. Errors of this package stay as they are,
    and so do those of a class that is not named below, such as `KeyError`.
    """
    try:
        yield
    except AmpLabError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise _one_line_error(error, model, shapes, device_type) from error


def _one_line_error(
    error: Exception, model: nn.Module, shapes: tuple, device_type: str
) -> TraceError:
    """The error of a model in one line, and what to do about it."""
    name = type(model).__name__
    if isinstance(error, NEEDS_VALUES):
        return ValuesNeeded(f"{name}: the result of {error.func} depends on values", error.func)
    if needs_memory(error):
        return MemoryNeeded(f"{name}: it reads the memory of a tensor")
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        cure = remedy_for(error, model, "forecast")
        return TraceError(f"{name}: torch cannot run {error.func} without values: {cure}")
    inputs = "no tensor as input"
    if shapes:
        inputs = f"input of shape {', '.join(map(str, shapes))}"
    reason = own_reason(error) or first_line(error)
    tip = tip_for(error, model, "forecast", device_type)  # with "; " before it, or ""
    return TraceError(f"{name} with {inputs}: {reason}{tip}")


@contextmanager
def _comparable_traces() -> Iterator[None]:
    """The block without garbage collection and oneDNN, which make traces differ.

    Traces of two batches are compared event by event.
    """
    collects_garbage = gc.isenabled()
    uses_onednn = torch._C._get_mkldnn_enabled()
    gc.disable()  # a collection would free storages at different moments in different traces
    # oneDNN's recurrent layers have no workspace on fake tensors. For all other ops autograd keeps
    # the same tensors with oneDNN and without it.
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(uses_onednn)
        if collects_garbage:
            gc.enable()
