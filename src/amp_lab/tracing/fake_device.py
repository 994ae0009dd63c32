"""Run a model as on a device that is not in this machine: fake tensors, and its autocast rules."""

import collections
import dataclasses
import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from amp_lab.core.autocast_inside import autocast_inside_kernels
from amp_lab.core.backends import BACKENDS, backend
from amp_lab.core.errors import DeviceError, TraceError
from amp_lab.core.remedies import remedy
from amp_lab.core.tensors import LOWER_DTYPES
from amp_lab.core.torch_versions import fused_gru_on_fakes, other_gpus_left_alone
from amp_lab.model_call import ModelCall
from amp_lab.tracing.attention import attention_of
from amp_lab.tracing.attributes import attribute_set
from amp_lab.tracing.decisions import Decisions, Replay
from amp_lab.tracing.device_guard import idle_guard
from amp_lab.tracing.dtype_checks import StrictFakeMode
from amp_lab.tracing.error_tips import tips_for
from amp_lab.tracing.fake_copies import QUANTISED, REAL_ALONE, FakeCopies
from amp_lab.tracing.flex_attention import flex_attention_traced

_DETECTOR = remedy(
    "trace.detector",
    "a detector of torchvision, whose results depend on values",
    "{verb} only model.backbone",
)
_LAZY = remedy(
    "trace.lazy",
    "a lazy layer has not run on any input yet",
    "call the model once where you build it, with inputs that have values: model(x)",
)
_TORCHSCRIPT = remedy(
    "trace.torchscript",
    "a model, or a part of it, is TorchScript",
    "give the nn.Module before torch.jit.script or torch.jit.trace",
)
_FLEX = remedy(
    "trace.flex_attention",
    "a model that trains calls flex_attention, which torch cannot differentiate on this device",
    '{verb} it for a GPU, with device_type="cuda" (amp-lab xray --device cuda)',
)
_CAUSAL_MASK = remedy(
    "trace.causal_mask",
    "nn.Transformer compares its mask with the causal one",
    "torch reads the mask to see whether it is causal. Pass tgt_is_causal=True or False to the "
    "model (for an encoder, is_causal or src_is_causal)",
)
_PART = remedy(
    "trace.part",
    "an op of the model depends on values, but one part of the model has no such op",
    "{verb} only model.{part}",
)
_PARTS = remedy(
    "trace.parts",
    "an op of the model depends on values",
    "{verb} the parts before it one by one",
)
FOR_REAL = remedy(
    "xray.for_real",
    "fake tensors cannot follow a model, because a run on the CPU takes other branches, or because "
    "an op has no rule for fake tensors",
    'run the model with real tensors on the CPU: xray(..., device_type="cpu", real=True), or '
    "amp-lab xray --device cpu --real",
)
_QUANTISED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
# Common names of parts of a model that contain no op whose result depends on values.
_PARTS_WITHOUT_DECISIONS = ("backbone", "encoder", "features")

# A phrase of torch's error on a device where flex_attention has no backward pass.
_NO_FLEX_BACKWARD = "FlexAttention does not support backward"

# A phrase of torch's error if code reads the memory of a fake tensor.
_NEEDS_MEMORY = "is not supported for tensor subclasses"
# Phrases of torch's errors about a packed sequence of fake tensors, whose lengths a recurrent layer
# reads. torch.tensor raises the first one too, for a list of fake tensors.
_PACKED_SAYS = ("its data is not allocated yet", "batch_sizes should always be on CPU")

# Raised by an op on fake tensors if its result, or the size of it, depends on values.
NEEDS_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


def checked_backend(device_type: str) -> str:
    """Return `device_type` if its autocast can be traced here; else raise `DeviceError`."""
    if device_type in BACKENDS:
        return device_type
    names = []
    for row in BACKENDS.values():
        vendor = f" ({row.vendor})" if row.vendor else ""
        names.append(f"{row.type!r}{vendor}")
    *others, last = names
    raise DeviceError(f"device type {device_type!r}: give {', '.join(others)} or {last}")


def checked_dtype(device_type: str, dtype: torch.dtype | None) -> torch.dtype:
    """Return `dtype` if autocast takes it, or the default of `device_type` if it is None.

    Raises `DeviceError` for another dtype or an unknown device type.
    """
    checked_backend(device_type)
    if dtype is None:
        return torch.get_autocast_dtype(device_type)
    if dtype not in LOWER_DTYPES:
        raise DeviceError(
            f"autocast on {device_type!r} does not support {dtype!r}: give torch.float16 or "
            "torch.bfloat16"
        )
    return dtype


def dtype_for(model: nn.Module, device_type: str) -> torch.dtype:
    """The default dtype for autocast, chosen by the dtypes of the weights.

    - No weights in 16 bits: the default of autocast on this type of device.
    - All weights in one 16-bit dtype: float32, which stands for "without autocast".
    - Other models, such as a bf16 base with fp32 adapters: the 16-bit dtype, fp16 before bf16.
    """
    low_dtypes = low_weight_dtypes(model)
    if not low_dtypes:
        return checked_dtype(device_type, None)
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if len(dtypes) == 1:
        return torch.float32
    return low_dtypes[0]


def low_weight_dtypes(model: nn.Module) -> list[torch.dtype]:
    """The 16-bit dtypes among the weights of a model, fp16 before bf16."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return [dtype for dtype in LOWER_DTYPES if dtype in dtypes]


@contextmanager
def autocast_on(
    device_type: str, dtype: torch.dtype | None = None, *, enabled: bool = True
) -> Iterator[None]:
    """Like `torch.autocast`, but works without the device. None as `dtype` is the device's default.

    Raises `DeviceError` for a dtype that autocast does not take.
    """
    dtype = checked_dtype(device_type, dtype)
    # The constructor of torch.autocast asks the device what it can do, and would disable itself. So
    # it is made disabled, and set up afterwards. The dispatcher looks only at the state that the
    # block sets, so fake tensors are cast as real ones are.
    # float16 is only a dtype that every device takes, until `fast_dtype` is set.
    block = torch.autocast(device_type, torch.float16, enabled=False, cache_enabled=True)
    block._enabled = enabled
    block.fast_dtype = dtype
    with autocast_inside_kernels(), block:
        yield


@contextmanager
def absent_device(device_type: str) -> Iterator[None]:
    """The block in which fake tensors of a device type work without such a device.

    Attention then runs as on that device, and recurrent layers as a composition of ops.

    Raises `DeviceError` if no device guard can be registered (see `device_guard`).
    """
    row = backend(checked_backend(device_type))
    with attention_of(row), flex_attention_traced(), ExitStack() as stack:
        # For an RNN, cuDNN would read the memory of the weights, which fake tensors lack.
        stack.enter_context(attribute_set(torch.backends.cudnn, "enabled", False))
        if not row.is_available():
            stack.enter_context(other_gpus_left_alone())
            if row.type == "cuda":
                stack.enter_context(_pretend_h100())
            # Without a guard for the device type, autograd would abort the process.
            if row.type == "cuda" and torch.backends.cuda.is_built():
                # FakeTensorMode does this itself only if torch knows of no accelerator at all.
                torch._C._ensureCUDADeviceGuardSet()
            else:
                stack.enter_context(idle_guard(row))
        yield


@contextmanager
def _pretend_h100() -> Iterator[None]:
    """The block in which torch.cuda reports an H100.

    Models ask for its properties, and so does a ``torch.autocast("cuda")`` inside the model or
    inside checkpointing, which would otherwise disable itself.
    """
    properties = SimpleNamespace(
        name="", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30
    )
    with (
        attribute_set(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        attribute_set(torch.cuda, "get_device_properties", lambda device=None: properties),
        attribute_set(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
        attribute_set(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
    ):
        yield


def errors_not_logged() -> AbstractContextManager:
    """The block in which fake tensors only raise an op's error, and do not log its traceback."""
    return attribute_set(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@functools.cache
def takes_wrappers(types: tuple[type, ...]) -> bool:
    """Whether an op gets a wrapper subclass, which is a tensor that contains other tensors.

    `types` are the types of the op's tensors, as torch passes them to `__torch_dispatch__`.
    The wrapper runs other ops on its inner tensors, and a dispatch mode gets these ops.
    """
    return any(hasattr(tensor_type, "__tensor_flatten__") for tensor_type in types)


@functools.cache
def is_composite(func: OpOverload) -> bool:
    """Whether torch can decompose an op of aten; False for ops of other libraries.

    Composite ops reach a mode only from the code of a wrapper.
    """
    if func.namespace != "aten":
        return False
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


class PlainOpsMode(TorchDispatchMode):
    """A mode that calls `run_op` for each op that is neither composite nor on wrapper subclasses.

    Composite ops and ops on wrappers are first split into ops on plain tensors.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an op, or split it into others, which torch sends here one by one."""
        if takes_wrappers(types):
            return NotImplemented  # torch then asks the wrapper, whose ops arrive here one by one
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return self.run_op(func, args, kwargs)

    def run_op(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an op, and return its result."""
        raise NotImplementedError


def remedy_for(error: Exception, model: nn.Module, verb: str) -> str:
    """The remedy for an op that fake tensors cannot run, usually to trace a part of the model.

    `error` is the error of the op, with its traceback. `verb` is the action for the part, such as
    "forecast". The part is the outermost module with a name such as "backbone" in which the error
    did not occur. If there is no such module, the remedy is to trace the parts before the failing
    op one by one.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # nn.Transformer has a remedy of its own.
    if any(frame.f_code.co_name == "_detect_is_causal_mask" for frame in frames):
        return _CAUSAL_MASK.text
    # The modules whose methods are in the traceback; the ids of other objects match no module.
    failing_ids = {id(frame.f_locals.get("self")) for frame in frames}
    traceable_names = []
    for name, module in model.named_modules():
        last_name = name.rpartition(".")[2]
        if id(module) not in failing_ids and last_name in _PARTS_WITHOUT_DECISIONS:
            traceable_names.append(name)
    if not traceable_names:
        return _PARTS.sentence(verb=verb)
    outermost = min(traceable_names, key=lambda name: name.count("."))
    return _PART.sentence(verb=verb, part=outermost)


def tip_for(error: Exception, model: nn.Module, verb: str, device_type: str, op: str = "") -> str:
    """The remedies for an error as text to append, each as "; remedy"; "" if there is none.

    A torchvision detector and a quantised model have one more remedy for every error. `verb` is the
    action that failed, such as "forecast". `op` is the op that failed; "" if the op is unknown.
    """
    tips = tips_for(error, op, device_type)
    if _NO_FLEX_BACKWARD in str(error):
        tips.append(_FLEX.sentence(verb=verb))
    if "torchvision.models.detection" in type(model).__module__:
        tips.append(_DETECTOR.sentence(verb=verb))
    elif any(map(is_wrapper, model.parameters())):  # a library's quantised weights are wrappers
        tips.append(QUANTISED.text)
    tips_once = dict.fromkeys(tips)  # two phrases of an error may have the same remedy
    return "".join(f"; {tip}" for tip in tips_once)


def needs_memory(error: Exception) -> bool:
    """Whether code read the memory of a fake tensor: ``.numpy()``, or a packed sequence."""
    message = str(error)
    if _NEEDS_MEMORY in message:
        return True
    if not any(phrase in message for phrase in _PACKED_SAYS):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(Path(file).name == "rnn.py" for file in files)


def require_model(model: object) -> None:
    """Raise `TraceError` unless `model` is an nn.Module that can be traced.

    The wrappers of DDP and DataParallel, TorchScript and lazy layers cannot be traced.
    """
    if not isinstance(model, nn.Module):
        description = f"a {type(model).__name__}"
        if isinstance(model, type):  # the class was given in place of an instance
            description = model.__name__
        raise TraceError(f"{description} is not a model: give an nn.Module")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        # The trace would include its hooks and copies, and its module names are not the model's.
        raise TraceError(f"{type(model).__name__} wraps the model: give its .module")
    _require_python_and_shapes(model)


def _require_python_and_shapes(model: nn.Module) -> None:
    """Raise `TraceError` for TorchScript, whose modules take no hooks, and for lazy layers.

    Lazy layers have no shapes yet.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(f"{_module_text(name)} is TorchScript: {_TORCHSCRIPT.text}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise TraceError(f"{name} belongs to a lazy layer and has no shape yet: {_LAZY.text}")


def _module_text(name: str) -> str:
    """A module for the beginning of an error message: ``module 'head'``, or ``the model``."""
    return f"module {name!r}" if name else "the model"


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """A call of a model on one device; on fake tensors if `on_fake_device` created it."""

    call: ModelCall  # its inputs are on the device; the model is the user's own
    # The tensors that take the place of the model's parameters and buffers, by name. A tied
    # parameter is the same tensor under each of its names.
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    fake: Callable[[torch.Tensor], torch.Tensor]  # the fake copy of a tensor, such as a target
    mode: StrictFakeMode | None = None  # None: the tensors are real

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.call.model

    @property
    def is_fake(self) -> bool:
        """Whether the tensors have no values."""
        return self.mode is not None

    def output(self) -> Any:
        """The output of the model, computed with fake weights if the run is fake."""
        call = self.call
        if not self.is_fake:
            return call.output()
        tensors = self.parameters | self.buffers
        return torch.func.functional_call(
            call.model, tensors, call.args, call.kwargs, tie_weights=False
        )

    @contextmanager
    def replaying(self, decisions: Decisions | None) -> Iterator[Replay]:
        """The block in which ops that depend on values return the results of a run with values.

        `decisions` are these results (see `tracing.decisions`); only a fake run uses them. If they
        are None, such ops raise. Yields the `Replay`, which counts what was used.
        """
        if decisions is None:
            yield Replay(Decisions())
            return
        replay = Replay(decisions)
        with replay.running.watched(self.model), attribute_set(self.mode, "replay", replay):
            yield replay


@contextmanager
def on_fake_device(call: ModelCall, device_type: str) -> Iterator[ModelRun]:
    """The block in which a model runs on fake tensors of `device_type`; yields a `ModelRun`.

    New tensors in the block are fake, and on `device_type` by default. The tensors of the model are
    neither moved nor changed. If they share memory, their fake copies share memory too. Use the
    fake tensors only inside the block: after the block, torch looks for the device again.

    Raises `DeviceError` for an unknown device type, and `TraceError` for a model that has no fake
    copy: a TorchScript model, or a model with lazy, sparse, sharded or some quantised tensors.
    """
    device = torch.device(checked_backend(device_type))
    model = call.model
    _require_python_and_shapes(model)
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith(_QUANTISED_MODULES):  # their kernels take no fake tensors
            description = f"{_module_text(name)} is a quantised {kind.__name__}"
            raise TraceError(f"{description}, {REAL_ALONE}: {QUANTISED.text}")
    # `with device` is a function mode, which disables torch's fast path for attention. So it is not
    # entered if tensors are made on that device anyway.
    is_default = torch.get_default_device().type == device.type
    with (
        StrictFakeMode() as mode,
        nullcontext() if is_default else device,
        absent_device(device_type),
        fused_gru_on_fakes(),
        errors_not_logged(),
        attributes_restored(model),
    ):
        copies = FakeCopies(device)

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return copies.of(tensor, "an input")

        yield ModelRun(
            call.map_inputs(fake),
            parameters=copies.of_each(model.named_parameters(remove_duplicate=False)),
            buffers=copies.of_each(model.named_buffers(remove_duplicate=False)),
            fake=fake,
            mode=mode,
        )


# The types of containers that are restored. OrderedDict, such as a module's hooks, comes before
# dict: it keeps its order in a list of its own, which `dict.clear` would not clear.
_CONTAINERS = (list, collections.OrderedDict, dict, set)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """The block at whose end the attributes of all modules get their old values back.

    Lists, dicts and sets in attributes get their old content back. A fake tensor that stayed there,
    such as torchvision's anchors, would break the next real call. The block does not write to
    containers that did not change, since some configs are dicts that forbid writing.
    """
    saved: list[tuple[Any, Any]] = []  # each container with a shallow copy of it
    for module in model.modules():
        attributes = vars(module)
        for value in (attributes, *attributes.values()):
            container_type = _container_type(value)
            if container_type is not None:
                saved.append((value, container_type(value)))
    try:
        yield
    finally:
        for container, content in saved:
            if _ids_of_contents(container) != _ids_of_contents(content):
                _restore(container, content)


def _container_type(value: object) -> type | None:
    """Which of `_CONTAINERS` a value is, or is a subclass of; None if it is no container."""
    for container_type in _CONTAINERS:
        if isinstance(value, container_type):
            return container_type
    return None


def _restore(container: Any, content: Any) -> None:
    """Give a container its old content back; `content` is a plain list, dict or set."""
    # Methods of the base type: a subclass, such as a config, may override its own.
    container_type = type(content)
    container_type.clear(container)
    if container_type is list:
        container_type.extend(container, content)
    else:
        container_type.update(container, content)


def _ids_of_contents(container: list | dict | set) -> list[int]:
    """The `id` of each element, or of each key and then of each value, in order."""
    values = container.values() if isinstance(container, dict) else ()
    return [*map(id, container), *map(id, values)]
