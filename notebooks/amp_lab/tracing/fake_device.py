"""Run a model as if on a device that is not here: fake tensors, and that device's autocast."""

import collections
import dataclasses
import functools
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

from amp_lab.backends import BACKENDS, backend
from amp_lab.errors import DeviceError, TraceError, first_line
from amp_lab.remedies import remedy
from amp_lab.torch_versions import fused_gru_on_fakes
from amp_lab.tracing.attention import attention_of
from amp_lab.tracing.decisions import Decisions, Replay
from amp_lab.tracing.device_guard import idle_guard
from amp_lab.tracing.dtype_checks import StrictFakeMode
from amp_lab.tracing.error_tips import tips_for
from amp_lab.tracing.ops_seen import LOWER_DTYPES, storage_key
from amp_lab.tracing.structures import map_tensors

_DETECTOR = remedy(
    "trace.detector",
    "a detector of torchvision, whose results depend on values",
    "{verb} model.backbone by itself",
)
_QUANTISED = remedy(
    "trace.quantised",
    "a model whose weights are tensors of a library for quantisation",
    "trace the model before it is quantised",
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
_REAL_ALONE = "for kernels that take real tensors alone"
_QUANTISED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
_BEFORE_VALUES = ("backbone", "encoder", "features")  # names of parts in which no value decides

_FLEX_MODULE = "torch.nn.attention.flex_attention"

# What torch says where code reads the memory of a tensor that has none.
_NEEDS_MEMORY = "is not supported for tensor subclasses"

# What an op raises on fake tensors if its result, or the size of it, depends on values.
NEEDS_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


def checked_backend(device_type: str) -> str:
    """`device_type`, if its autocast can be had without the device; else raises `DeviceError`."""
    if device_type not in BACKENDS:
        *others, last = [
            f"{row.type!r} ({row.made_by})" if row.made_by else repr(row.type)
            for row in BACKENDS.values()
        ]
        raise DeviceError(f"device type {device_type!r}: give {', '.join(others)} or {last}")
    return device_type


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
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    low = [dtype for dtype in LOWER_DTYPES if dtype in dtypes]
    if not low:
        return checked_dtype(device_type, None)
    return torch.float32 if dtypes == {low[0]} else low[0]


@contextmanager
def autocast_on(
    device_type: str, dtype: torch.dtype | None = None, *, enabled: bool = True
) -> Iterator[None]:
    """`torch.autocast`, also for a device that is not there; `DeviceError` for a wrong dtype."""
    dtype = checked_dtype(device_type, dtype)
    # torch.autocast checks what the device can do when it is made, and switches itself off. The
    # dispatcher obeys the state that it sets alone, so that fake tensors are cast as real ones are.
    block = torch.autocast(device_type, torch.float16, enabled=False, cache_enabled=True)
    block._enabled, block.fast_dtype = enabled, dtype
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
    name, key = func.name(), "CompositeImplicitAutograd"
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


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
    if "_detect_is_causal_mask" in {frame.f_code.co_name for frame in frames}:
        return _CAUSAL_MASK.text
    failed = {id(frame.f_locals.get("self")) for frame in frames}
    ran = [name for name, module in model.named_modules() if id(module) not in failed]
    names = [name for name in ran if name.rpartition(".")[2] in _BEFORE_VALUES]
    shortest = min(names, key=lambda name: name.count("."), default=None)
    found = _PART if shortest else _PARTS
    return found.said(verb=verb, part=shortest)


def own_reason(error: Exception) -> str:
    """Why a trace fails, where torch's own words would not tell; else empty."""
    return "no trace can follow flex_attention" if _is_flex(error) else ""


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
        tips.append(_QUANTISED.text)
    return "".join(f"; {tip}" for tip in dict.fromkeys(tips))


def needs_memory(error: Exception) -> bool:
    """Whether code read the memory of a fake tensor, as ``.numpy()`` does."""
    return _NEEDS_MEMORY in str(error)


def require_model(model: object) -> None:
    """Raise `TraceError` for no model, or one inside of what trains it on several devices."""
    if not isinstance(model, nn.Module):
        kind = model.__name__ if isinstance(model, type) else f"a {type(model).__name__}"
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
    return f"module {name!r}" if name else "the model"


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
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_QUANTISED_MODULES):
            kind = type(module).__name__
            raise TraceError(
                f"{_module_text(name)} is a quantised {kind}, {_REAL_ALONE}: {_QUANTISED.text}"
            )
    # A function mode closes torch's fast paths for attention: there is none where none is needed.
    same = torch.get_default_device().type == device.type
    with (
        StrictFakeMode() as mode,
        nullcontext() if same else device,
        absent_device(device_type),
        fused_gru_on_fakes(),
        errors_not_logged(),
        attributes_restored(model),
    ):
        copies = _Copies(device)
        parameters, buffers = (
            {name: copies.of(tensor, name) for name, tensor in named(remove_duplicate=False)}
            for named in (model.named_parameters, model.named_buffers)
        )

        def fake(structure: Any) -> Any:
            return map_tensors(lambda tensor: copies.of(tensor, "an input"), structure)

        given = fake(tuple(args)), fake(dict(kwargs))
        yield ModelRun(model, parameters, buffers, *given, fake=fake, mode=mode)


class _Copies:
    """Fake copies of tensors on one device, one for each tensor, one storage for each storage."""

    def __init__(self, device: torch.device):
        self._device = device
        # The originals are kept, so that no other tensor can come to have their address.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if id(tensor) not in self._copies:
            why_not = _without_fake_copy(tensor)
            if why_not is not None:
                raise TraceError(f"{name} {why_not}")
            made = self._wrapper(tensor, name) if is_wrapper(tensor) else self._plain(tensor)
            self._copies[id(tensor)] = tensor, made
        return self._copies[id(tensor)][1]

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor), tensor.dtype
        with torch.no_grad():
            if key not in self._storages:
                length = tensor.untyped_storage().nbytes() // tensor.itemsize
                self._storages[key] = torch.empty(length, dtype=tensor.dtype, device=self._device)
            copied = self._storages[key].as_strided(
                tensor.size(), tensor.stride(), tensor.storage_offset()
            )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, tensor.requires_grad)
        return copied.detach().requires_grad_(tensor.requires_grad)

    def _wrapper(self, tensor: Any, name: str) -> torch.Tensor:
        """A copy of a tensor that is made of tensors, such as a quantised weight and its scales."""
        kind = type(tensor)
        try:
            parts, context = tensor.__tensor_flatten__()
            copies = {part: self.of(getattr(tensor, part), name) for part in parts}
            made = kind.__tensor_unflatten__(copies, context, tensor.size(), tensor.stride())
            is_parameter = isinstance(tensor, nn.Parameter)
            return nn.Parameter(made, tensor.requires_grad) if is_parameter else made
        except Exception as error:  # whatever the code of the subclass raises
            why_not = f"is a {kind.__name__} without a fake copy ({first_line(error)})"
            raise TraceError(f"{name} {why_not}: {_QUANTISED.text}") from error


def _without_fake_copy(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no fake copy, and what to do about it; None if it has one."""
    if hasattr(tensor, "device_mesh"):
        return "is sharded over several devices: trace the model before it is sharded"
    # What bitsandbytes' weights carry beside their bytes, which only its kernels can read.
    if tensor.is_quantized or hasattr(tensor, "quant_state") or hasattr(tensor, "SCB"):
        return f"is quantised, {_REAL_ALONE}: {_QUANTISED.text}"
    plain = tensor.layout is torch.strided and not tensor.is_nested
    return None if plain else "is sparse or nested: only dense tensors have a fake copy"


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
        for container in (vars(module), *vars(module).values()):
            kind = next((k for k in _CONTAINERS if isinstance(container, k)), None)
            if kind is not None:
                before.append((kind, container, kind(container)))
    try:
        yield
    finally:
        for kind, container, content in before:
            if _identities(container) != _identities(content):
                kind.clear(container)
                (kind.extend if kind is list else kind.update)(container, content)


def _identities(container: list | dict | set) -> list[int]:
    """What tells the very things that a container holds, in their order."""
    if isinstance(container, dict):
        return [id(thing) for pair in container.items() for thing in pair]
    return [id(thing) for thing in container]
