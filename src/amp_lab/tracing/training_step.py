"""Trace one training step on fake tensors, and forecast its memory from the trace."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from amp_lab.core.backends import Backend, backend
from amp_lab.core.errors import TraceError
from amp_lab.core.optimizers import OPTIMIZERS
from amp_lab.core.precision import Precision
from amp_lab.core.report import listed, short_name
from amp_lab.core.tensors import LOWER_DTYPES
from amp_lab.model_call import ModelCall
from amp_lab.tracing.backward import Seeds, run_backward, seeds_of
from amp_lab.tracing.decisions import Replay
from amp_lab.tracing.fake_device import autocast_on, checked_backend
from amp_lab.tracing.memory_result import MemoryForecast
from amp_lab.tracing.optimizer_state import Parameter, optimizer_bytes
from amp_lab.tracing.records import RNN_LAYERS
from amp_lab.tracing.steps import TraceableStep, TracedStep, steps_on
from amp_lab.tracing.storage_ledger import StorageLedger, StorageTrace

_MOST_RANKS = 1024
_RNN_CAVEAT = ": the forecast uses torch's kernels; cuDNN or oneDNN may save twice as much."

LossFunction = Callable[[Any], torch.Tensor]


@contextmanager
def training_steps(
    model: nn.Module,
    device_type: str,
    precisions: Iterable[Precision | str],
    optimizer: str = "adam",
    fsdp_ranks: int = 1,
) -> Iterator[list["TrainingStep"]]:
    """The block in which training steps can be traced; yields one for each precision.

    With `fsdp_ranks` above 1, each is the step of one rank of FSDP2. Entering the block makes fake
    copies of the model's tensors, which takes as long as half a trace.

    Raises `TraceError` for an unknown optimizer or precision, for too many ranks, and if `model` is
    not a model; `DeviceError` for an unknown device type.
    """
    if optimizer not in OPTIMIZERS:
        raise TraceError(f"unknown optimizer {optimizer!r}: give one of {', '.join(OPTIMIZERS)}")
    if not 1 <= fsdp_ranks <= _MOST_RANKS:
        raise TraceError(f"fsdp_ranks={fsdp_ranks}: give 1 to {_MOST_RANKS}")
    checked_backend(device_type)
    traced_on = "cpu" if fsdp_ranks > 1 else device_type  # FSDP2 runs on fake tensors of the CPU
    with steps_on(model, traced_on, precisions) as (run, checked_precisions), torch.enable_grad():
        yield [
            TrainingStep(run, device_type, precision, optimizer, fsdp_ranks)
            for precision in checked_precisions
        ]


@dataclass(frozen=True)
class TrainingStep(TraceableStep):
    """A training step without its inputs; made by `training_steps`."""

    optimizer: str
    ranks: int = 1  # of FSDP2; 1: the model is not sharded

    @property
    def traced_on(self) -> str:
        """The type of device whose kernels run, and on which its inputs have to be."""
        return "cpu" if self.ranks > 1 else self.device_type

    def _trace(self, call: ModelCall, replay: Replay) -> "TracedTraining":
        """Run the step, and record its allocations.

        A sharded step runs twice, each time with the decisions of `replay`: the results that its
        ops which depend on values had in a real run.
        """
        if self.ranks > 1:
            from amp_lab.tracing.sharded_step import trace_sharded  # FSDP2 is slow to load

            trained, storages = trace_sharded(self, call, replay)
        else:
            trained, storages = self._trace_unsharded(call)
        parameters = tuple((tuple(tensor.shape), tensor.dtype) for tensor in trained)
        return TracedTraining(self, storages, trained=parameters)

    def _trace_unsharded(self, call: ModelCall) -> tuple[list[torch.Tensor], StorageTrace]:
        """Run the step; return the parameters that got a gradient, and what was allocated."""
        run = self.run
        ledger = StorageLedger(
            self.device_type,
            weights=run.parameters.values(),
            buffers=run.buffers.values(),
            inputs=call.tensors,
        )
        with (
            ledger.naming_modules(run.model),
            ledger,
            # Around the backward pass too, in which activation checkpointing calls modules again.
            _reparametrize_module(run.model, run.parameters | run.buffers),
        ):
            seeds = self._forward(ledger, call)
            gradients = run_backward(seeds)  # by the id of the parameter or other leaf
            # By id as well, so that a parameter with two names counts once.
            trained = {id(p): p for p in run.parameters.values() if id(p) in gradients}
            self._refuse_sparse(gradients)
            ledger.set_kind("gradients", [gradients[key] for key in trained])
            ledger.mark("backward")
        return list(trained.values()), ledger.trace(activations_at="forward")

    def _refuse_sparse(self, gradients: dict[int, torch.Tensor]) -> None:
        """Raise `TraceError` for sparse gradients of unknown size, or that the optimizer refuses.

        `gradients` are by the id of the parameter.
        """
        sparse = {key: gradient for key, gradient in gradients.items() if gradient.is_sparse}
        if OPTIMIZERS[self.optimizer].takes_sparse:
            reason = "values decide their size"
            # Some fake gradients have no values in them and so do not show their size: a sum of
            # sparse gradients, or the gradient of an `nn.EmbeddingBag` on a CPU.
            refused = {key for key, gradient in sparse.items() if gradient._nnz() == 0}
        else:
            supporting = [name for name, row in OPTIMIZERS.items() if row.takes_sparse]
            reason = (
                f"{self.optimizer} does not support sparse gradients "
                f"(use {' or '.join(supporting)})"
            )
            refused = set(sparse)
        if refused:
            names = [name for name, p in self.run.parameters.items() if id(p) in refused]
            raise TraceError(
                f"the gradients of {listed(names, 3)} are sparse, and {reason}: create the "
                "embedding with sparse=False"
            )

    def _forward(self, ledger: StorageLedger, call: ModelCall) -> Seeds:
        """Run the forward pass; return the tensors that the backward pass begins with.

        Marks two moments in the ledger: "cached" at the end of the autocast block, with autocast's
        cache still in memory, and "forward" after it. Raises `TraceError` if no gradient can reach
        the parameters.
        """
        device = backend(self.device_type)
        # Where a library runs recurrent layers, its casts take the place of autocast's.
        rnn_casts = _CastOnce(device) if device.fused_rnn_dtype else nullcontext()
        dtype = self.precision.dtype
        autocast_dtype = None if dtype is torch.float32 else dtype
        with autocast_on(self.device_type, autocast_dtype, enabled=autocast_dtype is not None):
            with ledger.noting_saved(), rnn_casts:
                result = checked_result(call)
            ledger.mark("cached")  # before the end of the block, which clears autocast's cache
        ledger.mark("forward")
        seeds = seeds_of(result)
        if not seeds and any(p.requires_grad for p in call.model.parameters()):
            raise TraceError(
                f"the output of {type(call.model).__name__} ({type(result).__name__}) has no "
                "gradient for its parameters. Give a loss_fn that computes a loss from this "
                "output, and let the forward pass record gradients"
            )
        return seeds


def checked_result(call: ModelCall) -> Any:
    """Run a model; return the loss, or the output if there is no loss function.

    Raises `TraceError` if the loss is not a tensor of one number.
    """
    result = call.result()
    if call.loss_fn is None or (isinstance(result, torch.Tensor) and result.numel() == 1):
        return result
    returned = type(result).__name__
    shape = tuple(getattr(result, "shape", ()))  # of a tensor or an array
    if shape:
        returned = str(shape)
    raise TraceError(f"loss_fn must return one number, not {returned}")


@dataclass(frozen=True)
class TracedTraining(TracedStep):
    """The allocations of a training step, and the parameters that got a gradient."""

    trained: tuple[Parameter, ...] = ()  # shape and dtype of each

    def forecast(self) -> MemoryForecast:
        """The forecast of the memory of this step.

        The trace has the forward and the backward pass. The state and the temporaries of the
        optimizer are computed from the trained parameters, and added here.
        """
        step = self.step
        storages = self.storages
        state, temporaries = optimizer_bytes(step.optimizer, self.trained, step.device_type)
        in_use = storages.in_use() + state  # the state is there all the time
        peak_events = self._peak_events(in_use)
        # The peak of each phase in bytes.
        phases = {phase: int(in_use[event]) for phase, event in peak_events.items()}
        phases["optimizer"] += temporaries
        peak_phase = max(phases, key=phases.__getitem__)
        events_to_peak = peak_events[peak_phase] + 1  # a count, which includes that event
        at_peak = storages.by_kind(events_to_peak)
        at_peak["optimizer"] += state
        if peak_phase == "optimizer":
            at_peak["temporaries"] += temporaries
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
            largest_at_peak=storages.largest(events_to_peak, phases[peak_phase]),
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
        if self.storages.caveat:
            yield self.storages.caveat
        if self.decisions:
            yield self.decisions


def _caveat_of_low_weights(model: nn.Module, precision: Precision) -> Iterator[str]:
    """A sentence on a step in fp32 or tf32 of a model whose weights are in 16 bits."""
    low = {short_name(p.dtype) for p in model.parameters() if p.dtype in LOWER_DTYPES}
    if low and precision in (Precision.FP32, Precision.TF32):
        names = listed(sorted(low))
        yield (
            f"Weights in {names} keep their dtype: {precision} here means this model without "
            "autocast."
        )


class _CastOnce(TorchFunctionMode):
    """Casts a recurrent layer's input, states and weights once, as autocast does for cuDNN.

    For libraries that take all weights as one flat copy, autocast casts them before the call
    (ATen/cudnn/AutocastRNN.cpp). Fake tensors run torch's own kernels instead, in which autocast
    would cast every weight again in every time step. So this mode makes the casts, and then runs
    the layer with autocast off.
    """

    def __init__(self, device: Backend):
        self._type = device.type
        self._dtype = device.fused_rnn_dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_rnn = getattr(func, "__name__", "") in RNN_LAYERS
        if not is_rnn or not torch.is_autocast_enabled(self._type):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        with autocast_on(self._type, self._dtype, enabled=False):
            return func(*args, **kwargs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in fp32 cast to the library's dtype; any other as it is."""
        if tensor.dtype is not torch.float32:
            return tensor
        return tensor.to(self._dtype)
