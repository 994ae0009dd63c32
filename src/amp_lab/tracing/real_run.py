"""Run a model once on the CPU, with values, and record each decision that depends on values."""

import enum
import functools
import random
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode

from amp_lab.core.device_facts import free_bytes
from amp_lab.core.errors import TraceError, with_type
from amp_lab.core.report import bytes_text
from amp_lab.core.tensors import (
    LOWER_DTYPES,
    named_tensors,
    storage_key,
    stored_values,
    tensors_in,
)
from amp_lab.model_call import ModelCall
from amp_lab.tracing.backward import (
    functions_of_the_model,
    lacks_formula,
    run_backward,
    seeds_of,
)
from amp_lab.tracing.decisions import (
    Decision,
    Decisions,
    NotAnswered,
    NoValues,
    depends_on_values,
    record_decision,
)
from amp_lab.tracing.fake_device import (
    PlainOpsMode,
    attributes_restored,
    autocast_on,
)
from amp_lab.tracing.finite_checks import remember_check
from amp_lab.tracing.flex_attention import flex_attention_traced
from amp_lab.tracing.running_module import RunningModule

SHARE_OF_MEMORY = 0.5
"""The share of the free memory that the run may take, its copy of the weights included."""

LIMIT_S = 60.0
"""The most seconds that the run may take."""


class Passes(enum.Enum):
    """The passes that a trace follows, so that a real run has to make them too."""

    FORWARD = enum.auto()  # without gradients
    # Backward too, but only if the model has an `autograd.Function` of its own.
    OWN_BACKWARD = enum.auto()
    BACKWARD = enum.auto()  # both passes

    def gradients(self) -> AbstractContextManager:
        """The block for the forward pass, in which gradients are on or off as the passes need it.

        On for `BACKWARD`, off for `FORWARD`, as the caller has set them for `OWN_BACKWARD`.
        """
        if self is Passes.OWN_BACKWARD:
            return nullcontext()
        return torch.set_grad_enabled(self is Passes.BACKWARD)


def decisions_of(
    call: ModelCall,
    passes: Passes = Passes.OWN_BACKWARD,
    unmarked: frozenset[OpOverload] = frozenset(),
) -> Decisions:
    """Run a model and its loss on the CPU in fp32, and return its decisions.

    A decision is the result of an op that depends on values, such as of ``x.sum() > 0``. The run
    has no autocast. The model runs on copies of its weights, buffers and inputs; 16-bit tensors are
    widened to fp32. Afterwards, the attributes of the model and every random number generator are
    as before.

    Args:
        call: The call of the model, with its loss.
        passes: The passes to make: a backward pass may take decisions too. No optimizer runs,
            because a forecast needs only the shapes of the parameters for its bytes.
        unmarked: Ops that count as decisions, although torch does not mark them.

    Raises:
        NotAnswered: If a tensor has no values, the run fails, it would take more than
            `SHARE_OF_MEMORY` of the free memory, or it takes longer than `LIMIT_S`.
    """
    _require_values(call)
    recorder = _Recorder(unmarked)
    with (
        attributes_restored(call.model),
        _generators_restored(),
        warnings.catch_warnings(),
        torch.device("cpu"),
        autocast_on("cpu", enabled=False),
        flex_attention_traced(any_device=True),
    ):
        warnings.simplefilter("ignore")  # the trace shows the same warnings
        try:
            _run_on_copies(call, passes, recorder)
        except TraceError:  # such as `NotAnswered`: it has its own advice
            raise
        except Exception as error:  # the user's model and loss may raise anything
            raise NotAnswered(f"the run on the CPU in fp32 fails: {with_type(error)}") from error
    if recorder.stop_reason is not None:  # the model may have caught what `_stop` raised
        raise NotAnswered(recorder.stop_reason)
    return Decisions(tuple(recorder.decisions), unmarked, recorder.is_finite)


def _require_values(call: ModelCall) -> None:
    """Raise `NoValues` if a weight, a buffer or an input is on ``meta``."""
    if any(tensor.is_meta for tensor in [*call.model.parameters(), *call.model.buffers()]):
        raise NoValues("the model is on 'meta' and has no values")
    if any(tensor.is_meta for tensor in call.tensors):
        raise NoValues("an input is on 'meta' and has no values")


def _run_on_copies(call: ModelCall, passes: Passes, recorder: "_Recorder") -> None:
    """Make the passes with copies of all tensors, while the recorder records the decisions.

    Sets `recorder.is_finite` from the output and the loss.
    """
    copy_of = functools.cache(recorder.copy)  # each tensor once, so that tied weights stay tied
    model = call.model
    originals = dict(model.named_parameters(remove_duplicate=False))
    originals |= dict(model.named_buffers(remove_duplicate=False))
    copies_by_name = {name: copy_of(tensor) for name, tensor in originals.items()}
    call_on_copies = call.map_inputs(copy_of)
    with (
        _reparametrize_module(model, copies_by_name),
        recorder.running.watched(model),
        _ListsByItems(),
        passes.gradients(),
        recorder,
    ):
        output = call_on_copies.output()
        loss_or_output = output if call.loss_fn is None else call.loss_fn(output)
        seeds = seeds_of(loss_or_output)  # the tensors that the backward pass begins with
        results = [tensor.detach() for _, tensor in named_tensors([output, loss_or_output])]
        # Now the backward pass can free the tensors that only the graphs of these two hold.
        del output, loss_or_output
        if passes is Passes.BACKWARD:
            run_backward(seeds)
        elif functions_of_the_model(seeds):  # never under `FORWARD`, which makes no graph
            try:
                run_backward(seeds)
            except RuntimeError as error:  # at an op without a formula an X-ray ends too
                if not lacks_formula(error):
                    raise
    recorder.is_finite = all(_is_finite(tensor) for tensor in results)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither infinities nor NaNs; integers have none."""
    values = stored_values(tensor)
    if not values.is_floating_point():
        return True
    return bool(values.float().isfinite().all())


class _ListsByItems(TorchFunctionMode):
    """The mode in which ``tolist`` reads a tensor item by item, as on fake tensors.

    Each ``item()`` is a decision. So the run takes as many as the trace that replays them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.tolist:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        if tensor.dim() == 0:
            return tensor.item()
        with self:  # on again: a mode is off while its own method runs
            return [item.tolist() for item in tensor]


class _Recorder(PlainOpsMode):
    """Records each decision of a run, and stops it if it takes too much memory or time."""

    def __init__(self, unmarked: frozenset[OpOverload]):
        super().__init__()
        self.running = RunningModule()
        self.decisions: list[Decision] = []
        self.is_finite = False  # whether the output and the loss have neither infinities nor NaNs
        self.stop_reason: str | None = None
        self._unmarked = unmarked  # see `decisions_of`
        self._free_bytes = free_bytes()  # when the run begins; None: the system does not say
        self._in_use = 0  # bytes of the storages below
        self._storages: dict[int, weakref.ref] = {}  # the living ones, by key
        self._started_at = time.monotonic()

    def run_op(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an op, count its memory, and record its result if it depends on values."""
        result = func(*args, **kwargs)
        # If the op is part of a check for inf or NaN, this stores on the result what the check
        # returns for finite values. `record_decision` reads it there.
        remember_check(func, args, kwargs, result)
        self._count(tensors_in(result))
        self.require_room(0)  # an op shows how much memory it takes only when it has run
        if time.monotonic() - self._started_at > LIMIT_S:
            self._stop(
                "the run on the CPU, which would have these values, takes longer than "
                f"{LIMIT_S:g} s"
            )
        if depends_on_values(func, args, self._unmarked):
            self.decisions.append(record_decision(self.running, func, (args, kwargs), result))
        return result

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the CPU, in fp32 if the tensor is in 16 bits; a parameter stays a parameter."""
        dtype = torch.float32 if tensor.dtype in LOWER_DTYPES else tensor.dtype
        self.require_room(tensor.numel() * dtype.itemsize)  # before it is allocated
        copied = tensor.detach().to("cpu", dtype, copy=True)
        self._count([copied])
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _count(self, tensors: list[torch.Tensor]) -> None:
        """Count the memory of tensors as in use until it is freed; each storage counts once."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key is not None and key not in self._storages:
                self._watch(key, stored_values(tensor).untyped_storage())

    def _watch(self, key: int, storage: torch.UntypedStorage) -> None:
        """Count a new storage, which has this `storage_key`, as in use until it is freed."""
        size = storage.nbytes()

        def note_end(_: weakref.ref) -> None:
            del self._storages[key]
            self._in_use -= size

        self._in_use += size
        self._storages[key] = weakref.ref(storage, note_end)

    def require_room(self, new_bytes: int) -> None:
        """Stop the run if it would take too much memory with `new_bytes` besides those in use."""
        if self._free_bytes is None:
            return
        allowed = int(SHARE_OF_MEMORY * self._free_bytes)
        if self._in_use + new_bytes > allowed:
            self._stop(
                "the run on the CPU, which would have these values, takes more than "
                f"{bytes_text(allowed)}, {100 * SHARE_OF_MEMORY:.0f} % of the free memory"
            )

    def _stop(self, reason: str) -> None:
        """Raise `NotAnswered` with this reason, and store the reason.

        The model may catch the error and go on; `decisions_of` then finds the reason here.
        """
        self.stop_reason = reason
        raise NotAnswered(reason)


@contextmanager
def _generators_restored() -> Iterator[None]:
    """The block after which the generators of Python, NumPy and torch are as they were before."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):  # only the CPU's: the run uses no other device
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
