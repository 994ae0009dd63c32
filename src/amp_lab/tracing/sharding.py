"""In which dtypes a model under FSDP2 or DDP is kept, gathered, computed and summed."""

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_lab.core.errors import TraceError
from amp_lab.core.precision import Precision
from amp_lab.core.torch_versions import fsdp_groups, fsdp_reduced_dtype
from amp_lab.parallel.ranks import REDUCE_DTYPES, Parallel
from amp_lab.tracing.fake_device import checked_backend, on_fake_device, require_model
from amp_lab.tracing.ops_seen import LOWER_DTYPES
from amp_lab.tracing.sharded_step import group_of, sharded
from amp_lab.tracing.sharding_result import (
    ShardedBuffer,
    ShardedParameter,
    ShardingXray,
    Unit,
    unit_named,
)
from amp_lab.tracing.structures import named_tensors
from amp_lab.tracing.xray import xray

_HOOKS = {"bf16_compress_hook": torch.bfloat16, "fp16_compress_hook": torch.float16}
_RANKS = 2  # more make no difference to a dtype


class _Call(NamedTuple):
    """What a call of the model gets."""

    inputs: tuple
    kwargs: dict[str, Any]


def xray_sharding(
    model: nn.Module,
    *inputs: Any,
    parallel: str | None = None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    device_type: str = "cuda",
    **kwargs: Any,
) -> ShardingXray:
    """In which dtype each parameter is stored, gathered, computed and summed, before a step.

        print(xray_sharding(model))  # after fully_shard(model, …), or DistributedDataParallel
        print(xray_sharding(model, x, parallel="fsdp", precision="bf16"))

    A model that FSDP2 has sharded, or that is in DDP, is read as it is, and nothing of it changes.
    Any other is taken as `amp-lab train` would, for `parallel` "fsdp" or "ddp", in `precision`
    (bf16 if it is None), with gradients summed in `reduce_dtype` (fp32), and no other process.
    `inputs` and `kwargs` are what a call gets. They tell what becomes of them, and, under DDP, what
    autocast to `precision` does on `device_type`; without `precision`, a DDP model runs without.
    Autocast around a model of FSDP2 is not seen.

    Raises `TraceError` for a model that is neither, one of FSDP1, settings beside a model that is
    sharded already, and autocast without inputs; `DeviceError` for a device type that torch lacks.
    """
    checked_backend(device_type)
    call = _Call(inputs, kwargs)
    kind = parallel_of(model)
    settings = {"parallel": parallel, "reduce_dtype": reduce_dtype}
    if kind is Parallel.FSDP:
        settings["precision"] = precision
    if kind is not None and any(settings.values()):
        raise _superfluous(settings, kind)
    if kind is Parallel.FSDP:
        return _read_fsdp(model, call)
    if isinstance(model, DistributedDataParallel):
        return _read_ddp(model, call, _chosen(precision, Precision.FP32), device_type)
    chosen = _chosen(precision, Precision.BF16)
    require_model(model)
    reduce_dtype = reduce_dtype or "fp32"
    if reduce_dtype not in REDUCE_DTYPES:
        raise TraceError(f"reduce_dtype {reduce_dtype!r}: give one of {', '.join(REDUCE_DTYPES)}")
    if parallel == Parallel.DDP:
        reduced = None if reduce_dtype == "fp32" else REDUCE_DTYPES[reduce_dtype]
        return _ddp(model, call, _autocast_dtypes(model, call, chosen, device_type), reduced)
    if parallel != Parallel.FSDP:
        name = type(model).__name__
        raise TraceError(f"{name} is neither sharded nor in DDP: give parallel='fsdp' or 'ddp'")
    # In a group that there is, such as the command's, it is sharded over that.
    group = nullcontext() if dist.is_initialized() else group_of(_RANKS)
    with group, on_fake_device(model, (), {}, "cpu") as run:
        tensors = run.parameters | run.buffers
        return _read_fsdp(sharded(model, tensors, chosen, reduce_dtype), call)


def _superfluous(settings: dict[str, str | None], kind: Parallel) -> TraceError:
    """The error of settings beside a model that has its own."""
    names = [name for name, value in settings.items() if value is not None]
    state = "sharded" if kind is Parallel.FSDP else "in DDP"
    return TraceError(f"the model is {state} already: leave out {names[0]}")


def _chosen(precision: str | None, default: Precision) -> Precision:
    if precision is None:
        return default
    return Precision(precision)


def parallel_of(model: nn.Module) -> Parallel | None:
    """How a model is shared among processes already; None: it is not."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # take a second to load

    if not isinstance(model, nn.Module):
        return None
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise TraceError("FullyShardedDataParallel is FSDP1: shard the model with fully_shard")
    if any(isinstance(module, FSDPModule) for module in modules):
        return Parallel.FSDP
    if isinstance(model, DistributedDataParallel):
        return Parallel.DDP
    return None


def _read_fsdp(model: nn.Module, call: _Call) -> ShardingXray:
    names = {module: name for name, module in model.named_modules()}
    units: list[Unit] = []
    unit_of: dict[str, str] = {}  # by the name of a module
    parameters: list[ShardedParameter] = []
    managed: set[int] = set()
    for state, modules in _states(model).items():
        module_names = [names[module] for module in modules]
        unit = _unit(", ".join(module_names), state)
        units.append(unit)
        unit_of |= dict.fromkeys(module_names, unit.name)
        for group in fsdp_groups(state):
            parameters += _parameters_of_group(group, unit.name, names)
            managed |= _parameter_ids(group)
    for name, own in model.named_parameters():
        if id(own) not in managed:
            parameters.append(_parameter(model, name, own, computed=own.dtype, unit=None))
    root = unit_named("", units)
    return ShardingXray(
        model=_class_of(model),
        kind="FSDP2",
        units=units,
        parameters=parameters,
        buffers=_buffers(model, unit_of),
        inputs=_inputs(call, root.inputs if root else None),
    )


def _parameter_ids(group: Any) -> set[int]:
    """The ids of a group's parameters; while one is gathered, the whole one is the module's."""
    found = set()
    for own in group.fsdp_params:
        found.add(id(own.sharded_param))
        found.add(id(getattr(own, "_unsharded_param", None)))
    return found


def _states(model: nn.Module) -> dict[Any, list[nn.Module]]:
    """What FSDP2 keeps of each unit, with its modules: `fully_shard` takes several together."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[Any, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            found.setdefault(module._get_fsdp_state(), []).append(module)
    return found


def _unit(name: str, state: Any) -> Unit:
    refusal = None
    for group in fsdp_groups(state):
        try:
            group._init_mp_dtypes()  # as the first step does: it sets dtypes, the same every time
        except AssertionError as error:
            refusal = str(error)
    policy = state._mp_policy
    return Unit(
        name,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        refusal=refusal,
    )


def _parameters_of_group(
    group: Any, unit: str, names: dict[nn.Module, str]
) -> Iterator[ShardedParameter]:
    reduced = _reduce_dtype(group)
    for own in group.fsdp_params:
        info = own._module_info
        computed = own.param_dtype or own.orig_dtype
        # A weight of torchao in FP8 or MX gathers itself, in a dtype of its own.
        gathers_itself = hasattr(own._sharded_local_tensor, "fsdp_pre_all_gather")
        is_trained = own.sharded_param.requires_grad
        yield ShardedParameter(
            name=f"{names[info.module]}.{info.param_name}".removeprefix("."),
            unit=unit,
            stored=own.orig_dtype,
            gathered=None if gathers_itself else computed,
            computed=computed,
            reduced=reduced if is_trained else None,
            trained=is_trained,
            elements=own.sharded_param.numel(),
            of_norm=_is_norm(info.module),
        )


def _reduce_dtype(group: Any) -> torch.dtype | None:
    """The dtype in which a group's gradients are summed; None if nothing in it is trained."""
    trained = [own for own in group.fsdp_params if own.sharded_param.requires_grad]
    if not trained:
        return None
    # Of several, which only newer versions take, the one that holds them all.
    return functools.reduce(torch.promote_types, map(fsdp_reduced_dtype, trained))


def _read_ddp(
    ddp: DistributedDataParallel, call: _Call, precision: Precision, device_type: str
) -> ShardingXray:
    if ddp.mixed_precision is not None:
        raise TraceError("DDP's own mixed_precision is not read: use autocast instead")
    hooks = [getattr(hook, "__name__", type(hook).__name__) for hook, _ in ddp._comm_hooks]
    reduced = _HOOKS.get(hooks[0]) if hooks else None
    unknown_hook = next((name for name in hooks if name not in _HOOKS), None)
    computed = _autocast_dtypes(ddp.module, call, precision, device_type)
    return _ddp(ddp.module, call, computed, reduced, unknown_hook, ddp.parameters_to_ignore)


def _ddp(
    model: nn.Module,
    call: _Call,
    computed: dict[str, torch.dtype],
    reduced: torch.dtype | None,
    hook: str | None = None,
    ignored: frozenset[str] | set[str] = frozenset(),
) -> ShardingXray:
    """The table of a model in DDP; gradients are summed in their own dtype without `reduced`."""
    parameters = []
    for name, own in model.named_parameters():
        computed_dtype = computed.get(name, own.dtype)
        unit = None if name in ignored else ""
        reduced_dtype = reduced or own.dtype
        if unit is None or hook is not None:
            reduced_dtype = None
        parameters.append(_parameter(model, name, own, computed_dtype, unit, reduced_dtype))
    return ShardingXray(
        model=_class_of(model),
        kind="DDP",
        units=[Unit("")],
        parameters=parameters,
        buffers=_buffers(model, {"": ""}),
        inputs=_inputs(call, None),
        hook=hook,
    )


def _autocast_dtypes(
    model: nn.Module, call: _Call, precision: Precision, device_type: str
) -> dict[str, torch.dtype]:
    """What autocast casts parameters to."""
    dtype = precision.dtype
    if dtype not in LOWER_DTYPES:
        return {}
    if not call.inputs and not call.kwargs:
        raise TraceError("what autocast casts depends on the ops: give the inputs of a call")
    found = xray(model, *call.inputs, device_type=device_type, dtype=dtype, **call.kwargs)
    if found.raised is not None:
        raise TraceError(found.raised)
    casts = [cast for cast in found.casts if cast.is_of_parameter]
    return {cast.what.removeprefix("parameter "): cast.to_dtype for cast in casts}


def _parameter(
    model: nn.Module,
    name: str,
    own: nn.Parameter,
    computed: torch.dtype,
    unit: str | None,
    reduced: torch.dtype | None = None,
) -> ShardedParameter:
    """One that each rank has as a whole."""
    module = model.get_submodule(name.rpartition(".")[0])
    return ShardedParameter(
        name=name,
        unit=unit,
        stored=own.dtype,
        gathered=None,
        computed=computed,
        reduced=reduced if own.requires_grad else None,
        trained=own.requires_grad,
        elements=own.numel(),
        of_norm=_is_norm(module),
    )


def _buffers(model: nn.Module, unit_of: dict[str, str]) -> list[ShardedBuffer]:
    """The buffers, each with the unit of the innermost module around it that is of one."""
    found = []
    for name, buffer in model.named_buffers():
        owner = name.rpartition(".")[0]
        around = owner
        while around and around not in unit_of:
            around = around.rpartition(".")[0]
        is_of_norm = _is_norm(model.get_submodule(owner))
        found.append(ShardedBuffer(name, unit_of.get(around), buffer.dtype, is_of_norm))
    return found


def _inputs(call: _Call, cast: torch.dtype | None) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """The dtype of each input, and the one in which the model gets it."""
    found = {}
    for place, tensor in named_tensors([*call.inputs]) + named_tensors(call.kwargs):
        arrives = tensor.dtype
        if cast and tensor.is_floating_point():
            arrives = cast
        found[place.lstrip(".")] = tensor.dtype, arrives
    return found


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _class_of(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")  # its class is changed by `fully_shard`
