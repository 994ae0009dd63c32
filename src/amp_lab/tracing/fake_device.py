"""Run a model as if on a device that is not here: fake tensors, and that device's autocast."""

import collections
import dataclasses
import functools
import itertools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from amp_lab.core.backends import BACKENDS, backend
from amp_lab.core.errors import DeviceError, TraceError
from amp_lab.core.remedies import remedy
from amp_lab.core.torch_versions import fused_gru_on_fakes
from amp_lab.tracing.attention import attention_of
from amp_lab.tracing.decisions import Decisions, Replay
from amp_lab.tracing.device_guard import idle_guard
from amp_lab.tracing.dtype_checks import StrictFakeMode
from amp_lab.tracing.error_tips import tips_for
from amp_lab.tracing.fake_copies import QUANTISED, REAL_ALONE, FakeCopies
from amp_lab.tracing.ops_seen import LOWER_DTYPES
from amp_lab.tracing.structures import map_tensors

_DETECTOR = remedy(
    "trace.detector",
    "a detector of torchvision, whose results depend on values",
    "{verb} model.backbone by itself",
)
_LAZY = remedy(
    "trace.lazy",
    "a lazy layer has not seen an input yet",
    "call the model once on inputs that have values, model(x), where it is built",
)
_TORCHSCRIPT = remedy(
    "trace.torchscript",
    "a model, or a part of it, is TorchScript",
    "give the nn.Module that it was scripted or traced from",
)
_FLEX = remedy(
    "trace.flex_attention",
    "a model calls flex_attention, which fake tensors cannot run",
    "{verb} it with F.scaled_dot_product_attention in its place: for q, k and v in 16 bits the "
    "output has the same shape and dtype",
)
_CAUSAL_MASK = remedy(
    "trace.causal_mask",
    "nn.Transformer compares its mask with the causal one",
    "torch reads the mask to see whether it is causal: call the model with tgt_is_causal=True or "
    "False (is_causal or src_is_causal for an encoder)",
)
_PART = remedy(
    "trace.part",
    "an op of the model depends on values, and a part of it does not",
    "{verb} model.{part} by itself",
)
_PARTS = remedy(
    "trace.parts",
    "an op of the model depends on values",
    "{verb} the parts before it one by one",
)
FOR_REAL = remedy(
    "xray.for_real",
    "fake tensors cannot follow a model, and a run on the CPU takes another course, or has an op "
    "that has no rule for fake tensors",
    'run it for real on the CPU, xray(..., device_type="cpu", real=True), which is '
    "amp-lab xray --device cpu --real",
)
_QUANTISED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
_BEFORE_VALUES = ("backbone", "encoder", "features")  # names of parts in which no value decides

_FLEX_MODULE = "torch.nn.attention.flex_attention"

# What torch says where code reads the memory of a tensor that has none.
_NEEDS_MEMORY = "is not supported for tensor subclasses"

# What an op raises on fake tensors if its result, or the size of it, depends on values.
NEEDS_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


def checked_backend(device_type: str) -> str:
    """`device_type`, if its autocast can be had without the device; else raises `DeviceError`."""
    if device_type in BACKENDS:
        return device_type
    names = []
    for row in BACKENDS.values():
        maker = f" ({row.made_by})" if row.made_by else ""
        names.append(f"{row.type!r}{maker}")
    *others, last = names
    raise DeviceError(f"device type {device_type!r}: give {', '.join(others)} or {last}")


def checked_dtype(device_type: str, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of autocast on `device_type`, its default for None; `DeviceError` if it is none."""
    checked_backend(device_type)
    if dtype is None:
        return torch.get_autocast_dtype(device_type)
    if dtype not in LOWER_DTYPES:
        raise DeviceError(
            f"autocast on {device_type!r} does not take {dtype!r}: "
            "give torch.float16 or torch.bfloat16"
        )
    return dtype


def dtype_for(model: nn.Module, device_type: str) -> torch.dtype:
    """What a model is run in if nobody says: autocast's default, unless its weights say more.

    A model whose weights are all in low precision runs as it is, without autocast (float32 stands
    for that); one with some, such as a bf16 base with fp32 adapters, under autocast to those.
    """
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    low_dtypes = [dtype for dtype in LOWER_DTYPES if dtype in dtypes]
    if not low_dtypes:
        return checked_dtype(device_type, None)
    if len(dtypes) == 1:
        return torch.float32
    return low_dtypes[0]


@contextmanager
def autocast_on(
    device_type: str, dtype: torch.dtype | None = None, *, enabled: bool = True
) -> Iterator[None]:
    """`torch.autocast`, also for a device that is not there; `DeviceError` for a wrong dtype."""
    dtype = checked_dtype(device_type, dtype)
    # torch.autocast checks what the device can do when it is made, and switches itself off. The
    # dispatcher obeys the state that it sets alone, so that fake tensors are cast as real ones are.
    block = torch.autocast(device_type, torch.float16, enabled=False, cache_enabled=True)
    block._enabled = enabled
    block.fast_dtype = dtype
    with block:
        yield


@contextmanager
def absent_device(device_type: str) -> Iterator[None]:
    """The block in which torch does not look for the device when it works on fake tensors there.

    Raises `DeviceError` if torch keeps its guards out of reach.
    """
    row = backend(checked_backend(device_type))
    with attention_of(row), ExitStack() as stack:
        if not row.is_available():
            # cuDNN would read the memory of a recurrent network's weights, which fakes do not have.
            stack.enter_context(attribute_set(torch.backends.cudnn, "enabled", False))
            if row.type == "cuda":
                stack.enter_context(_card_that_is_asked_for())
            if row.type == "cuda" and torch.backends.cuda.is_built():
                # FakeTensorMode does so by itself, but only where torch knows of no accelerator.
                torch._C._ensureCUDADeviceGuardSet()
            else:
                stack.enter_context(idle_guard(row))
        yield


@contextmanager
def _card_that_is_asked_for() -> Iterator[None]:
    """The block in which a model that asks for the card is told of an H100.

    So does a ``torch.autocast("cuda")`` of the model or of checkpointing, which counts then.
    """
    card = SimpleNamespace(
        name="", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30
    )
    with (
        attribute_set(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        attribute_set(torch.cuda, "get_device_properties", lambda device=None: card),
        attribute_set(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
        attribute_set(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
    ):
        yield


@contextmanager
def attribute_set(owner: Any, name: str, value: object) -> Iterator[None]:
    """The block in which an attribute of a module or class of torch has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def errors_not_logged() -> AbstractContextManager:
    """The block in which fake tensors only raise an op's error, and do not log its traceback."""
    return attribute_set(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@functools.cache
def takes_wrappers(types: tuple[type, ...]) -> bool:
    """Whether an op gets a tensor made of tensors: it runs others on those, which a mode sees."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


@functools.cache
def is_composite(func: OpOverload) -> bool:
    """Whether an op is made of others, as it arrives inside of a wrapper's own code."""
    if func.namespace != "aten":
        return False
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


class PlainOpsMode(TorchDispatchMode):
    """A mode that runs each op by `run_op`; of an op on wrappers, the ops that it is made of."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if takes_wrappers(types):
            return NotImplemented
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return self.run_op(func, args, kwargs)

    def run_op(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an op, and return its result."""
        raise NotImplementedError


def remedy_for(error: Exception, model: nn.Module, verb: str) -> str:
    """What to do about an op that fakes cannot run: to `verb` (X-ray, forecast) a part before it.

    That may be a detector's backbone.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # nn.Transformer compares a mask with the causal one, unless it is told what the mask is.
    if any(frame.f_code.co_name == "_detect_is_causal_mask" for frame in frames):
        return _CAUSAL_MASK.text
    failed = {id(frame.f_locals.get("self")) for frame in frames}
    names = []
    for name, module in model.named_modules():
        own_name = name.rpartition(".")[2]
        if own_name in _BEFORE_VALUES and id(module) not in failed:
            names.append(name)
    if not names:
        return _PARTS.said(verb=verb)
    outermost = min(names, key=lambda name: name.count("."))
    return _PART.said(verb=verb, part=outermost)


def own_reason(error: Exception) -> str:
    """Why a trace fails, where torch's own words would not tell; else empty."""
    if not _is_flex(error):
        return ""
    return "no trace can follow flex_attention"


def _is_flex(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == _FLEX_MODULE for frame, _ in frames)


def tip_for(error: Exception, model: nn.Module, verb: str, device_type: str, op: str = "") -> str:
    """What to do about a known error of an `op`, or any of detectors and of quantised weights."""
    tips = tips_for(error, op, device_type)
    if _is_flex(error):
        tips.append(_FLEX.said(verb=verb))
    if "torchvision.models.detection" in type(model).__module__:
        tips.append(_DETECTOR.said(verb=verb))
    elif any(map(is_wrapper, model.parameters())):
        tips.append(QUANTISED.text)
    return "".join(f"; {tip}" for tip in dict.fromkeys(tips))


def needs_memory(error: Exception) -> bool:
    """Whether code read the memory of a fake tensor, as ``.numpy()`` does."""
    return _NEEDS_MEMORY in str(error)


def require_model(model: object) -> None:
    """Raise `TraceError` for no model, or one inside of what trains it on several devices."""
    if not isinstance(model, nn.Module):
        kind = f"a {type(model).__name__}"
        if isinstance(model, type):
            kind = model.__name__
        raise TraceError(f"{kind} is no model: give an nn.Module, the model itself")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        # Its hooks and copies for each device would be traced, and their names are not the model's.
        raise TraceError(f"{type(model).__name__} wraps the model: give its .module")
    _require_python_and_shapes(model)


def _require_python_and_shapes(model: nn.Module) -> None:
    """Raise `TraceError` for TorchScript, whose modules take no hooks, and for lazy layers."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(f"{_module_text(name)} is TorchScript: {_TORCHSCRIPT.text}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise TraceError(f"{name} of a lazy layer has no shape yet: {_LAZY.text}")


def _module_text(name: str) -> str:
    if not name:
        return "the model"
    return f"module {name!r}"


def _require_not_quantised(model: nn.Module) -> None:
    """Raise `TraceError` for torch's quantised modules, whose kernels take no fake tensors."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith(_QUANTISED_MODULES):
            what = f"{_module_text(name)} is a quantised {kind.__name__}"
            raise TraceError(f"{what}, {REAL_ALONE}: {QUANTISED.text}")


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """A model and its inputs on one device; on a fake one it is made by `on_fake_device`."""

    model: nn.Module
    parameters: dict[str, torch.Tensor]  # under all their names: a tied one is one tensor
    buffers: dict[str, torch.Tensor]
    args: tuple
    kwargs: dict[str, Any]
    fake: Callable[[Any], Any]  # makes fake copies of all tensors in a structure, such as a target
    mode: StrictFakeMode | None = None  # None: the tensors are real

    @property
    def is_fake(self) -> bool:
        """Whether the tensors have no values."""
        return self.mode is not None

    def call(self) -> Any:
        """The output of the model for `args` and `kwargs`, with its fake tensors in place."""
        if not self.is_fake:
            return self.model(*self.args, **self.kwargs)
        return torch.func.functional_call(
            self.model, self.parameters | self.buffers, self.args, self.kwargs, tie_weights=False
        )

    @contextmanager
    def told(self, decisions: Decisions | None) -> Iterator[Replay]:
        """The block in which ops whose results depend on values return what they did for real."""
        replay = Replay(decisions or Decisions())
        if decisions is None:
            yield replay
            return
        with replay.running.watched(self.model), attribute_set(self.mode, "replay", replay):
            yield replay


@contextmanager
def on_fake_device(
    model: nn.Module, args: tuple, kwargs: Mapping[str, Any], device_type: str
) -> Iterator[ModelRun]:
    """The block in which `model` runs on fake tensors of `device_type`, wherever it really is.

    In the block tensors are fake ones, and those made without a device are on `device_type`. The
    model's own are neither moved nor changed, and those that share memory do so as fakes too.
    Compute with its tensors inside alone: after it, torch looks for the device again.

    Raises `DeviceError` for an unknown device type, and `TraceError` for a model that has no fake
    copy: one with lazy, sparse or sharded tensors, some quantised ones, or one of TorchScript.
    """
    device = torch.device(checked_backend(device_type))
    _require_python_and_shapes(model)
    _require_not_quantised(model)
    # A function mode closes torch's fast paths for attention: there is none where none is needed.
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

        def fake_input(tensor: torch.Tensor) -> torch.Tensor:
            return copies.of(tensor, "an input")

        def fake(structure: Any) -> Any:
            return map_tensors(fake_input, structure)

        yield ModelRun(
            model,
            parameters=copies.of_each(model.named_parameters(remove_duplicate=False)),
            buffers=copies.of_each(model.named_buffers(remove_duplicate=False)),
            args=fake(tuple(args)),
            kwargs=fake(dict(kwargs)),
            fake=fake,
            mode=mode,
        )


# What holds the attributes of modules. An OrderedDict, such as a module's hooks, keeps its order in
# a list of its own, which `dict.clear` would leave as it is.
_CONTAINERS = (list, collections.OrderedDict, dict, set)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """The block after which attributes of the modules, and lists and dicts in them, are as before.

    A fake tensor left there, such as torchvision's anchors, would break the next real call. What
    did not change is not touched: some configs are dicts that forbid it.
    """
    before: list[tuple[Any, Any, Any]] = []  # kind, container and what it holds
    for module in model.modules():
        attributes = vars(module)
        for container in (attributes, *attributes.values()):
            kind = _kind_of_container(container)
            if kind is not None:
                before.append((kind, container, kind(container)))
    try:
        yield
    finally:
        for kind, container, content in before:
            if _identities(container) == _identities(content):
                continue
            kind.clear(container)
            if kind is list:
                kind.extend(container, content)
            else:
                kind.update(container, content)


def _kind_of_container(thing: object) -> Any:
    for kind in _CONTAINERS:
        if isinstance(thing, kind):
            return kind
    return None


def _identities(container: list | dict | set) -> list[int]:
    """What tells the very things that a container holds, in their order."""
    if not isinstance(container, dict):
        return [id(thing) for thing in container]
    return [id(thing) for thing in itertools.chain.from_iterable(container.items())]
