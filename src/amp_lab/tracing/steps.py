"""Shared by training steps and forward passes: a model on a fake device, and its trace."""

import dataclasses
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor

from amp_lab.core.errors import AmpLabError, TraceError, first_line
from amp_lab.core.precision import Precision
from amp_lab.model_call import ModelCall
from amp_lab.tracing.decisions import Decisions, MemoryNeeded, Replay, ValuesNeeded
from amp_lab.tracing.error_tips import NO_FAKE, op_without_fake
from amp_lab.tracing.fake_device import (
    NEEDS_VALUES,
    ModelRun,
    checked_backend,
    needs_memory,
    on_fake_device,
    remedy_for,
    require_model,
    tip_for,
)
from amp_lab.tracing.storage_ledger import StorageTrace
from amp_lab.tracing.transformers_masks import masks_of_transformers

# In the error of fake tensors for an op that gets tensors of two devices.
_MIXED_DEVICES = "to be on the same device"


@contextmanager
def steps_on(
    model: nn.Module, device_type: str, precisions: Iterable[Precision | str]
) -> Iterator[tuple[ModelRun, list[Precision]]]:
    """The block in which a model can be traced; yields the model and the checked precisions.

    Raises `TraceError` if `model` is not a model, or for a missing or unknown precision;
    `DeviceError` for an unknown device type.
    """
    names = list(precisions)
    if not names:
        raise TraceError("precisions is empty; give at least one")
    require_model(model)
    for precision in names:
        if precision not in list(Precision):
            raise TraceError(f"precision {precision!r}: give one of {', '.join(Precision)}")
    checked_backend(device_type)
    with _comparable_traces(), on_fake_device(ModelCall(model), device_type) as run:
        yield run, [Precision(precision) for precision in names]


@dataclass(frozen=True)
class TraceableStep:
    """A training step or a forward pass without its inputs; the subclasses define the step."""

    run: ModelRun  # the model on its fake device; the inputs in it are not used
    device_type: str
    precision: Precision

    @property
    def column(self) -> str:
        """The heading of its forecast in a table."""
        return str(self.precision)

    @property
    def traced_on(self) -> str:
        """The type of device whose kernels run, and on which its inputs have to be."""
        return self.device_type

    def trace(self, call: ModelCall, decisions: Decisions | None = None) -> Any:
        """Run the step once, with the fake inputs of `call`; return its `TracedStep`.

        If its ops mix devices, the step runs again with the CPU as the default device. Some models
        need tensors that are made without a device to be on the CPU. One is torchvision's SSD,
        which computes boxes from such tensors and from sizes that it holds.

        `decisions` are the results that ops which depend on values had in a real run on such
        inputs; None: no op of the model does. Raises `TraceError` for a step that fails or that no
        trace can follow.
        """
        try:
            return self._trace_once(call, decisions)
        except TraceError as error:
            if _MIXED_DEVICES not in str(error):
                raise
            first_error = error
        try:
            with torch.device("cpu"):
                return self._trace_once(call, decisions)
        except TraceError as error:
            if _MIXED_DEVICES not in str(error):
                raise
            raise first_error from first_error.__cause__

    def _trace_once(self, call: ModelCall, decisions: Decisions | None) -> "TracedStep":
        """Run the step with the `decisions`, and check that it takes all of them."""
        shapes = call.shapes
        with self.run.replaying(decisions) as replay, masks_of_transformers(call, decisions):
            with _one_line_errors(call.model, shapes, self.device_type):
                traced = self._trace(call, replay)
            replay.require_done()
        return dataclasses.replace(traced, input_shapes=shapes, decisions=replay.remark)

    def _trace(self, call: ModelCall, replay: Replay) -> "TracedStep":
        """Run the step, as each subclass defines it.

        `replay` gives ops that depend on values their results of a real run; it may be empty.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TracedStep:
    """A step that ran on inputs of some shapes, with the storages that it allocated."""

    step: Any  # of the subclass of `TraceableStep`
    storages: StorageTrace
    input_shapes: tuple[tuple[int, ...], ...] = ()
    decisions: str = ""  # a sentence, if the step took the decisions of a run on the CPU

    def forecast(self) -> Any:
        """The forecast for this step; each subclass returns its own kind."""
        raise NotImplementedError


@contextmanager
def _one_line_errors(model: nn.Module, shapes: tuple, device_type: str) -> Iterator[None]:
    """The block in which an error of a model becomes a `TraceError` of one line.

    `shapes` has the shape of each input tensor. Errors of this package stay as they are, and so do
    those of a class that is not named below, such as `KeyError`.
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
        return MemoryNeeded(f"{name}: the model reads the memory of a tensor")
    without_fake = op_without_fake(error)
    if without_fake:
        cure = NO_FAKE.sentence(op=without_fake)
        return TraceError(f"{name}: the op {without_fake} has no fake implementation: {cure}")
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        cure = remedy_for(error, model, "forecast")
        return TraceError(f"{name}: torch cannot run {error.func} without values: {cure}")
    inputs = "no tensor as input"
    if shapes:
        inputs = f"input of shape {', '.join(map(str, shapes))}"
    reason = first_line(error)
    tip = tip_for(error, model, "forecast", device_type)  # with "; " before it, or ""
    return TraceError(f"{name} with {inputs}: {reason}{tip}")


@contextmanager
def _comparable_traces() -> Iterator[None]:
    """The block without garbage collection and oneDNN, which would make traces differ.

    The traces of two batches have to allocate and free their storages in the same order, because
    they are compared event by event.
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
