"""X-ray of a model: the dtypes of each op under autocast, and each cast, on a fake device."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from amp_lab.core.device import preserve_random_state
from amp_lab.core.errors import TraceError, first_line, with_type
from amp_lab.core.precision import require_backend
from amp_lab.core.remedies import remedy
from amp_lab.core.report import dtype_name, short_name
from amp_lab.core.tensors import named_leaves
from amp_lab.model_call import ModelCall
from amp_lab.tracing.advice import advise
from amp_lab.tracing.answered import answered
from amp_lab.tracing.compiled import has_compiled_modules, without_wrapper
from amp_lab.tracing.decisions import Decisions, MemoryNeeded, NotAnswered
from amp_lab.tracing.fake_device import (
    ModelRun,
    checked_backend,
    checked_dtype,
    dtype_for,
    low_weight_dtypes,
    on_fake_device,
    require_model,
    tip_for,
)
from amp_lab.tracing.flex_attention import flex_attention_traced
from amp_lab.tracing.module_table import module_rows
from amp_lab.tracing.operands import low_operand, remedy_for_mixed
from amp_lab.tracing.records import place_of
from amp_lab.tracing.tracer import Tracer
from amp_lab.tracing.transformers_masks import masks_of_transformers
from amp_lab.tracing.xray_result import Xray

_UNDER_AUTOCAST = remedy(
    "dtype.cast_model_under_autocast",
    "a model cast to fp16 or bf16 gets fp32 somewhere, but runs under autocast",
    "or run the model under autocast, which works: dtype=torch.{dtype} (amp-lab xray --dtype "
    "{short})",
)
_AUTOCAST_OFF = remedy(
    "xray.cast_model",
    "the weights of a model are all in fp16 or bf16, and you gave no dtype",
    "All weights are in {short}, so this X-ray runs the model without autocast. "
    "dtype=torch.{dtype} (amp-lab xray --dtype {short}) turns autocast on.",
)
_TRAINED_CAST = remedy(
    "xray.trained_cast_model",
    "the weights of a model in training mode are all in fp16 or bf16, and you gave no dtype",
    "If you train this model in {short}, rounding removes small optimizer steps, and a norm's "
    "weight of 1 may never change. Keep the weights in fp32 with model.float(), and use {short} "
    "only through autocast.",
    failure="AMP0029",
)


def xray(
    model: nn.Module,
    *inputs: Any,
    device_type: str = "cuda",
    dtype: torch.dtype | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    real: bool = False,
    **kwargs: Any,
) -> Xray:
    """Show in which dtype each op of a model runs under autocast, on any type of device.

    The model runs one forward pass on fake tensors. Fake tensors have no values, so the device need
    not be in this machine. If a branch of the model depends on values, copies of the model and its
    inputs first run on the CPU in fp32. The forward pass then takes the same branches, and
    `Xray.decisions` mentions this.

    Args:
        model: The model. It is neither changed nor moved.
        *inputs: The positional arguments of the call: tensors of any shape, on any device, also
            ``meta``.
        device_type: "cuda" (also for ROCm), "xpu", "mps" or "cpu".
        dtype: The dtype that autocast computes in: torch.float16 or torch.bfloat16. torch.float32
            turns autocast off. If None, autocast uses the default of the device type, with two
            exceptions: if all weights have one 16-bit dtype, autocast is off; if only some weights
            are in 16 bits, autocast uses their dtype.
        loss_fn: A function that computes the loss from the output. It runs under autocast too.
        real: Whether to run a copy of the model on the device itself, with values.
        **kwargs: The keyword arguments of the call.

    Returns:
        An `Xray`. Print it to see a table of modules with their ops, dtypes and casts.

    Raises:
        TraceError: If `model` is not an nn.Module, if the inputs contain no tensor, if the model
            also fails without autocast, or if the model depends on values that the run on the CPU
            does not have.
        DeviceError: If the device type does not exist, if autocast does not take `dtype`, or if
            `real` is set and the device is not in this machine.

    Example:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
        result = xray(model, torch.empty(8, 64), device_type="cuda", dtype=torch.bfloat16)
        print(result)
        for row in result.rows:
            print(row.module, row.op, row.dtype)
    """
    return xray_call(ModelCall(model, inputs, kwargs, loss_fn), device_type, dtype, real)


def xray_call(
    call: ModelCall, device_type: str, dtype: torch.dtype | None = None, real: bool = False
) -> Xray:
    """The X-ray of a call of a model; for the other arguments see `xray`."""
    model = call.model
    checked_backend(device_type)
    if real:
        require_backend(device_type)
    require_model(model)
    for name, tensor in model.named_parameters():
        _check_values(tensor, f"parameter {name!r}", real)
    autocast_off = ""
    if dtype is None:
        autocast_off = _autocast_off(model)
        dtype = dtype_for(model, device_type)
    if dtype is not torch.float32:
        checked_dtype(device_type, dtype)
    _check_inputs(call, real)
    # Without the wrapper of torch.compile the model runs in eager mode.
    call = dataclasses.replace(call, model=without_wrapper(model))
    if real:
        result = _build_xray(_TraceSettings(call, device_type, real=True), dtype)
    else:
        result = _xray_on_fakes(call, device_type, dtype)
    return dataclasses.replace(
        result, autocast_off=autocast_off, compiled=has_compiled_modules(model)
    )


@dataclass(frozen=True)
class _TraceSettings:
    """Everything that a trace needs, except the dtype of autocast."""

    call: ModelCall
    device_type: str
    real: bool  # whether a copy of the model runs on the device itself, not on fake tensors
    # For fake tensors: the results that ops which depend on values had in a real run.
    decisions: Decisions | None = None

    def trace(self, dtype: torch.dtype) -> Tracer:
        """Trace a forward pass under autocast to `dtype`; float32: without autocast."""
        if self.real:
            return _trace_for_real(self.call, self.device_type, dtype)
        return _trace_on_fakes(self.call, self.device_type, self.decisions, dtype)


def _xray_on_fakes(call: ModelCall, device_type: str, dtype: torch.dtype) -> Xray:
    """The X-ray of the model on fake tensors.

    If the model asks for values, `answered` runs it on the CPU, and traces it again with the
    decisions of that run. If this does not help, it tries the model for real to name a remedy.
    """

    def xray_with(call: ModelCall, decisions: Decisions | None) -> Xray:
        settings = _TraceSettings(call, device_type, real=False, decisions=decisions)
        return _build_xray(settings, dtype)

    def xray_for_real() -> Xray:
        return _build_xray(_TraceSettings(call, "cpu", real=True), dtype)

    return answered(xray_with, call, "X-ray", for_real=xray_for_real)


def _autocast_off(model: nn.Module) -> str:
    """A remark if autocast is off by default, because all weights are in 16 bits; else ""."""
    # float32 stands for no autocast, and is the answer for every device type or for none.
    if dtype_for(model, "cpu") is not torch.float32:
        return ""
    dtype = low_weight_dtypes(model)[0]
    short = short_name(dtype)
    remark = _AUTOCAST_OFF.sentence(dtype=dtype_name(dtype), short=short)
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if model.training and is_trained:
        remark = f"{remark} {_TRAINED_CAST.sentence(short=short)}"
    return remark


def _build_xray(settings: _TraceSettings, dtype: torch.dtype) -> Xray:
    """Trace a model under autocast to `dtype`, and make an X-ray of the trace.

    Raises `TraceError` if the model fails without autocast too.
    """
    model = settings.call.model
    tracer = settings.trace(dtype)
    raised = _raised_under_autocast(tracer, settings)
    return Xray(
        model=type(model).__name__,
        device_type=tracer.device_type,
        dtype=tracer.dtype,
        real=settings.real,
        rows=tracer.rows,
        casts=tracer.casts,
        output_dtypes=[dtype for dtype, _ in tracer.outputs.values()],
        outputs=tracer.outputs,
        loss_dtype=tracer.loss_dtype,
        raised=raised,
        advice=advise(tracer, raised),
        modules=module_rows(model, tracer.module_calls),
        decisions=tracer.decisions,
        training=model.training,
    )


def _raised_under_autocast(tracer: Tracer, settings: _TraceSettings) -> str | None:
    """Explain the error of a trace that ended with one, if the model runs without autocast.

    None if there is no error. Raises `TraceError` if the model fails without autocast too: then the
    model or its inputs are wrong, and a table is of no use. A run without autocast that gets beyond
    the failed op, and then to code that no trace can follow, counts as one that does not fail.
    """
    if tracer.error is None:
        return None
    call = settings.call
    explained = _explain_error(tracer, call)
    without_autocast = tracer
    if tracer.dtype is not torch.float32:  # autocast was on
        try:
            without_autocast = settings.trace(torch.float32)
        except (MemoryNeeded, NotAnswered) as stop:
            return f"{explained}; the run without autocast stops later: {stop}"
    if without_autocast.error is None:
        return explained
    if not low_weight_dtypes(call.model):
        raise TraceError(_explain_error(without_autocast, call)) from without_autocast.error
    # A model with some weights in 16 bits may need autocast to run, so the first error counts.
    raise TraceError(explained + _autocast_tip(tracer, settings)) from tracer.error


def _autocast_tip(tracer: Tracer, settings: _TraceSettings) -> str:
    """The advice to turn autocast on, with "; " before it; "" unless that makes the model run.

    `tracer` has the failed trace of a model with weights in 16 bits.
    """
    if tracer.dtype is not torch.float32:  # autocast was on already
        return ""
    if low_operand(tracer.failed_on) is None:  # the op fails for another reason than its dtypes
        return ""
    dtype = low_weight_dtypes(settings.call.model)[0]
    try:
        error = settings.trace(dtype).error
    except TraceError:  # the trace ends, so nobody knows whether the model would run
        return ""
    if error is not None:
        return ""
    return f"; {_UNDER_AUTOCAST.sentence(dtype=dtype_name(dtype), short=short_name(dtype))}"


def _trace_on_fakes(
    call: ModelCall, device_type: str, decisions: Decisions | None, dtype: torch.dtype
) -> Tracer:
    """Trace a forward pass on fake tensors under autocast to `dtype`; float32: without autocast.

    `decisions` has the results that ops which depend on values had in a real run; None: there was
    none.
    """

    def trace(default_device: contextlib.AbstractContextManager) -> Tracer:
        with (
            on_fake_device(call, device_type) as run,
            default_device,
            run.replaying(decisions) as replay,
            masks_of_transformers(run.call, decisions),
        ):
            tracer = Tracer(device_type, dtype, run).follow()
            if tracer.error is None:  # a run that fails takes fewer decisions than the real one
                replay.require_done()
            tracer.decisions = replay.remark
            return tracer

    tracer = trace(contextlib.nullcontext())
    # torch's error for tensors on different devices names the devices.
    if not isinstance(tracer.error, RuntimeError) or "device" not in str(tracer.error):
        return tracer
    # Some models need tensors that are made without a device to be on the CPU. If that does not
    # help either, the first error is the one to show.
    second_tracer = trace(torch.device("cpu"))
    if second_tracer.error is not None:
        return tracer
    return second_tracer


def _trace_for_real(call: ModelCall, device_type: str, dtype: torch.dtype) -> Tracer:
    """Trace a forward pass of a copy of the model on the device itself."""
    try:
        call = call.copy()
    except (RuntimeError, TypeError) as error:  # tensors of a graph, locks, open files
        raise TraceError(
            f"real=True needs a copy of the model, but copying failed: {first_line(error)}"
        ) from error
    call = call.to(device_type)  # the copy: the user's own model stays where it is
    run = ModelRun(
        call,
        parameters=dict(call.model.named_parameters()),
        buffers=dict(call.model.named_buffers()),
        fake=lambda tensor: tensor,  # the real tensors take the place of fakes
    )
    with preserve_random_state(device_type), flex_attention_traced():
        return Tracer(device_type, dtype, run).follow()


def _explain_error(tracer: Tracer, call: ModelCall) -> str:
    """The error of a trace in a line, with the model's inputs, the op that failed, and a remedy."""
    error = tracer.error
    assert error is not None
    model = call.model
    shapes = [f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}" for tensor in call.tensors]
    inputs = ", ".join(shapes) or "of no tensor"
    op = "an op"
    where = ""
    if tracer.failed_at is not None:
        module, op = tracer.failed_at
        where = f" in {place_of(module)} ({op})"
    reason = with_type(error)
    has_low_weights = bool(low_weight_dtypes(model))
    cure = remedy_for_mixed(error, op, tracer.failed_on, has_low_weights)
    if cure:
        reason = f"{reason}; {cure}"
    tip = tip_for(error, model, "X-ray", tracer.device_type, op)  # with "; " before it, or ""
    return f"{type(model).__name__} fails on input {inputs}{where}: {reason}{tip}"


def _check_inputs(call: ModelCall, real: bool) -> None:
    """Raise `TraceError` for inputs that cannot be traced, and for misspelt options of `xray`."""
    # A model may have an argument of this name itself.
    forward = call.model.forward
    for misspelt, option in (("device", "device_type="), ("precision", "dtype=")):
        if misspelt in call.kwargs and misspelt not in inspect.signature(forward).parameters:
            raise TraceError(
                f"neither xray nor the model has an argument {misspelt}=: give {option}"
            )
    arguments: dict[Any, Any] = dict(enumerate(call.args)) | call.kwargs
    has_tensor = False
    for position_or_name, value in arguments.items():
        text = f"input {position_or_name!r}"
        if isinstance(value, nn.utils.rnn.PackedSequence) and not real:
            raise TraceError(
                f"{text} is a PackedSequence, which has no fake copy: give a padded tensor"
            )
        leaves = [leaf for _, leaf in named_leaves(value, open_objects=True)]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                has_tensor = True
                _check_values(leaf, text, real)
            elif hasattr(leaf, "__array__"):  # NumPy's, pandas'
                kind = type(leaf).__name__
                raise TraceError(
                    f"{text} is a {kind}, not a tensor: convert it with torch.as_tensor"
                )
        # torchinfo takes a shape. After a tensor, it may be an argument of the model.
        if not has_tensor and _is_shape(value):
            raise TraceError(f"{text} is {value!r}, not a tensor: give torch.empty{tuple(value)}")
    if arguments and not has_tensor:
        kind = type(next(iter(arguments.values()))).__name__
        raise TraceError(f"the inputs contain no tensor, only a {kind}: give a tensor")


def _is_shape(value: object) -> bool:
    """Whether a value is a tuple or a list of integers."""
    if not isinstance(value, (tuple, list)) or not value:
        return False
    return all(isinstance(size, int) for size in value)


def _check_values(tensor: torch.Tensor, name: str, real: bool) -> None:
    """Raise `TraceError` for a tensor without values, if the model runs for real."""
    if real and tensor.is_meta:
        raise TraceError(f"{name} is on 'meta' and has no values: use real=False")
