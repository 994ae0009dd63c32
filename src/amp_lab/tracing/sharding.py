"""The dtypes in which FSDP2 or DDP stores, gathers, computes and sums each parameter of a model."""

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
from amp_lab.core.tensors import LOWER_DTYPES, named_tensors
from amp_lab.core.torch_versions import fsdp_groups, fsdp_reduced_dtype
from amp_lab.parallel.ranks import REDUCE_DTYPES, Parallel
from amp_lab.tracing.fake_device import checked_backend, on_fake_device, require_model
from amp_lab.tracing.sharded_step import group_of, sharded
from amp_lab.tracing.sharding_result import (
    ShardedBuffer,
    ShardedParameter,
    ShardingXray,
    Unit,
    unit_named,
)
from amp_lab.tracing.xray import xray

# torch's communication hooks for DDP, with the dtype in which they sum gradients.
_COMPRESS_HOOKS = {"bf16_compress_hook": torch.bfloat16, "fp16_compress_hook": torch.float16}
_RANKS = 2  # more ranks do not change any dtype


class _Call(NamedTuple):
    """The arguments of a call of the model."""

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
    """Show in which dtype each parameter is stored, gathered, computed and summed, before a step.

        print(xray_sharding(model))  # after fully_shard(model, …), or DistributedDataParallel
        print(xray_sharding(model, x, parallel="fsdp", precision="bf16"))

    A model that FSDP2 has sharded, or that is in DDP, is read as it is, and nothing of it changes.
    Any other model is treated as `amp-lab train` would, for `parallel` "fsdp" or "ddp", in
    `precision` (bf16 if it is None), with gradients summed in `reduce_dtype` (fp32). No other
    process is started. `inputs` and `kwargs` are the arguments of a call. The result shows to what
    they are cast and, under DDP, what autocast to `precision` does on `device_type`; without
    `precision`, a DDP model runs without autocast. Autocast around a model of FSDP2 is not seen.

    Raises `TraceError` for a model of FSDP1, for one that is neither sharded nor in DDP if
    `parallel` is not given, for settings that a model has already, and for autocast without inputs;
    `DeviceError` for a device type that torch lacks.
    """
    checked_backend(device_type)
    call = _Call(inputs, kwargs)
    # A model that is sharded or in DDP already has these settings. Only the precision of autocast
    # around DDP is not part of the model.
    own_parallel = parallel_of(model)
    settings = {"parallel": parallel, "reduce_dtype": reduce_dtype}
    if own_parallel is Parallel.FSDP:
        settings["precision"] = precision
    if own_parallel is not None and any(settings.values()):
        raise _superfluous_setting(settings, own_parallel)
    # First models that are sharded or in DDP already, then those to be treated as `train` would.
    if own_parallel is Parallel.FSDP:
        return _read_fsdp(model, call)
    if isinstance(model, DistributedDataParallel):
        return _read_ddp(model, call, _or_default(precision, Precision.FP32), device_type)
    train_precision = _or_default(precision, Precision.BF16)
    require_model(model)
    reduce_dtype = reduce_dtype or "fp32"
    if reduce_dtype not in REDUCE_DTYPES:
        raise TraceError(f"reduce_dtype {reduce_dtype!r}: give one of {', '.join(REDUCE_DTYPES)}")
    if parallel == Parallel.DDP:
        # DDP sums gradients in their own dtype, for which None stands, unless a hook casts them.
        reduced = None if reduce_dtype == "fp32" else REDUCE_DTYPES[reduce_dtype]
        autocast_dtypes = _autocast_dtypes(model, call, train_precision, device_type)
        return _ddp_table(model, call, autocast_dtypes, reduced)
    if parallel != Parallel.FSDP:
        name = type(model).__name__
        raise TraceError(f"{name} is neither sharded nor in DDP: give parallel='fsdp' or 'ddp'")
    # If this process is in a group already, the model is sharded over that one.
    group = nullcontext() if dist.is_initialized() else group_of(_RANKS)
    with group, on_fake_device(model, (), {}, "cpu") as run:
        tensors = run.parameters | run.buffers
        return _read_fsdp(sharded(model, tensors, train_precision, reduce_dtype), call)


def _superfluous_setting(settings: dict[str, str | None], own_parallel: Parallel) -> TraceError:
    """The error for the first of the settings that is not None: the model has it already.

    `settings` are the arguments of `xray_sharding` by their names.
    """
    names = [name for name, value in settings.items() if value is not None]
    state = "sharded" if own_parallel is Parallel.FSDP else "in DDP"
    return TraceError(f"the model is {state} already: leave out {names[0]}")


def _or_default(precision: str | None, default: Precision) -> Precision:
    """The precision of this name; the default for None."""
    if precision is None:
        return default
    return Precision(precision)


def parallel_of(model: nn.Module) -> Parallel | None:
    """Whether a model is sharded by FSDP2 or in DDP; None for neither.

    Raises `TraceError` for a model of FSDP1.
    """
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
    """The X-ray of a model that `fully_shard` has sharded."""
    names = {module: name for name, module in model.named_modules()}
    units: list[Unit] = []
    unit_of: dict[str, str] = {}  # by the name of a module
    parameters: list[ShardedParameter] = []
    managed_ids: set[int] = set()
    for state, modules in _states(model).items():
        module_names = [names[module] for module in modules]
        unit = _unit(", ".join(module_names), state)
        units.append(unit)
        unit_of |= dict.fromkeys(module_names, unit.name)
        for group in fsdp_groups(state):
            parameters += _parameters_of_group(group, unit.name, names)
            managed_ids |= _parameter_ids(group)
    # Parameters that are in no unit, so that each rank has all of them.
    for name, parameter in model.named_parameters():
        if id(parameter) not in managed_ids:
            row = _whole_parameter(model, name, parameter, computed=parameter.dtype, unit=None)
            parameters.append(row)
    root = unit_named("", units)  # the model's own unit casts the inputs
    return ShardingXray(
        model=_class_of(model),
        kind="FSDP2",
        units=units,
        parameters=parameters,
        buffers=_buffers(model, unit_of),
        inputs=_inputs(call, root.inputs if root else None),
    )


def _parameter_ids(group: Any) -> set[int]:
    """The ids of a group's parameters, sharded and gathered: a module has either of the two."""
    ids = set()
    for fsdp_param in group.fsdp_params:
        ids.add(id(fsdp_param.sharded_param))
        ids.add(id(getattr(fsdp_param, "_unsharded_param", None)))
    return ids


def _states(model: nn.Module) -> dict[Any, list[nn.Module]]:
    """FSDP2's state of each unit, with the unit's modules: `fully_shard` may get several."""
    from torch.distributed.fsdp import FSDPModule

    modules_of: dict[Any, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            modules_of.setdefault(module._get_fsdp_state(), []).append(module)
    return modules_of


def _unit(name: str, state: Any) -> Unit:
    """The unit of a state of FSDP2, with its policy and the error that its first step raises."""
    refusal = None
    for group in fsdp_groups(state):
        try:
            group._init_mp_dtypes()  # sets and checks the dtypes, as the first step does
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
    """The rows of the parameters in `group`, a group of FSDP2 that is gathered together.

    `unit` is the name of its unit, and `names` has the names of all modules of the model.
    """
    reduced = _reduce_dtype(group)
    for fsdp_param in group.fsdp_params:
        info = fsdp_param._module_info
        computed = fsdp_param.param_dtype or fsdp_param.orig_dtype
        # A weight of torchao in FP8 or MX gathers itself, in a dtype of its own.
        gathers_itself = hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather")
        is_trained = fsdp_param.sharded_param.requires_grad
        yield ShardedParameter(
            name=f"{names[info.module]}.{info.param_name}".removeprefix("."),
            unit=unit,
            stored=fsdp_param.orig_dtype,
            gathered=None if gathers_itself else computed,
            computed=computed,
            reduced=reduced if is_trained else None,
            trained=is_trained,
            elements=fsdp_param.sharded_param.numel(),
            of_norm=_is_norm(info.module),
        )


def _reduce_dtype(group: Any) -> torch.dtype | None:
    """The dtype in which a group's gradients are summed; None if nothing in it is trained."""
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    if not trained:
        return None
    # Newer versions of torch take several dtypes in a group; the widest holds all the sums.
    return functools.reduce(torch.promote_types, map(fsdp_reduced_dtype, trained))


def _read_ddp(
    ddp: DistributedDataParallel, call: _Call, precision: Precision, device_type: str
) -> ShardingXray:
    """The X-ray of a model in DDP, as its communication hook and its ignored parameters say.

    Raises `TraceError` for a model in DDP's own mixed precision.
    """
    if ddp.mixed_precision is not None:
        raise TraceError("DDP's own mixed_precision is not read: use autocast instead")
    hooks = [getattr(hook, "__name__", type(hook).__name__) for hook, _ in ddp._comm_hooks]
    # A hook that is not torch's may do anything with gradients, so its dtype is not known.
    reduced = _COMPRESS_HOOKS.get(hooks[0]) if hooks else None
    unknown_hooks = [name for name in hooks if name not in _COMPRESS_HOOKS]
    return _ddp_table(
        ddp.module,
        call,
        _autocast_dtypes(ddp.module, call, precision, device_type),
        reduced,
        unknown_hook=unknown_hooks[0] if unknown_hooks else None,
        ignored=ddp.parameters_to_ignore,
    )


def _ddp_table(
    model: nn.Module,
    call: _Call,
    autocast_dtypes: dict[str, torch.dtype],
    reduced: torch.dtype | None,
    unknown_hook: str | None = None,
    ignored: frozenset[str] | set[str] = frozenset(),
) -> ShardingXray:
    """The X-ray of a model in DDP; `model` is the model itself, without DDP's wrapper.

    `autocast_dtypes` has the parameters that autocast casts, by name, with the dtype after the
    cast. Gradients are summed in `reduced`, or in their own dtype if it is None; how an
    `unknown_hook` sums them is not known. `ignored` has the names of the parameters whose gradients
    DDP does not sum.
    """
    parameters = []
    for name, parameter in model.named_parameters():
        computed = autocast_dtypes.get(name, parameter.dtype)
        unit = None if name in ignored else ""  # the whole model is one unit
        own_reduced = reduced or parameter.dtype
        if unit is None or unknown_hook is not None:
            own_reduced = None
        row = _whole_parameter(model, name, parameter, computed, unit, own_reduced)
        parameters.append(row)
    return ShardingXray(
        model=_class_of(model),
        kind="DDP",
        units=[Unit("")],
        parameters=parameters,
        buffers=_buffers(model, {"": ""}),  # all in the one unit, which is the model itself
        inputs=_inputs(call, cast_to=None),
        hook=unknown_hook,
    )


def _autocast_dtypes(
    model: nn.Module, call: _Call, precision: Precision, device_type: str
) -> dict[str, torch.dtype]:
    """The dtype after the cast of each parameter that autocast casts, by the parameter's name.

    Empty if autocast is off. Raises `TraceError` for a call without inputs, and for a model that
    fails under autocast.
    """
    dtype = precision.dtype
    if dtype not in LOWER_DTYPES:
        return {}
    if not call.inputs and not call.kwargs:
        raise TraceError("what autocast casts depends on the ops: give the inputs of a call")
    result = xray(model, *call.inputs, device_type=device_type, dtype=dtype, **call.kwargs)
    if result.raised is not None:
        raise TraceError(result.raised)
    casts = [cast for cast in result.casts if cast.is_of_parameter]
    return {cast.what.removeprefix("parameter "): cast.to_dtype for cast in casts}


def _whole_parameter(
    model: nn.Module,
    name: str,
    parameter: nn.Parameter,
    computed: torch.dtype,
    unit: str | None,
    reduced: torch.dtype | None = None,
) -> ShardedParameter:
    """The row of a parameter that is not sharded, so that it is never gathered.

    `computed` and `reduced` are dtypes and `unit` is a name, as in `ShardedParameter`.
    """
    module = model.get_submodule(name.rpartition(".")[0])
    return ShardedParameter(
        name=name,
        unit=unit,
        stored=parameter.dtype,
        gathered=None,
        computed=computed,
        reduced=reduced if parameter.requires_grad else None,
        trained=parameter.requires_grad,
        elements=parameter.numel(),
        of_norm=_is_norm(module),
    )


def _buffers(model: nn.Module, unit_of: dict[str, str]) -> list[ShardedBuffer]:
    """The buffers, each with its unit: that of its module, or of the next module around it.

    `unit_of` has the name of the unit of each module that `fully_shard` got, by the module's name.
    """
    buffers = []
    for name, buffer in model.named_buffers():
        owner = name.rpartition(".")[0]
        # From the buffer's module outwards to the first one that is in a unit.
        unit_module = owner
        while unit_module and unit_module not in unit_of:
            unit_module = unit_module.rpartition(".")[0]
        is_of_norm = _is_norm(model.get_submodule(owner))
        buffers.append(ShardedBuffer(name, unit_of.get(unit_module), buffer.dtype, is_of_norm))
    return buffers


def _inputs(call: _Call, cast_to: torch.dtype | None) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """For each input its dtype, and the dtype in which the model gets it, by the input's name.

    The name is a number for an input without one: ``0``, or ``0.image`` inside a dict.
    """
    dtypes = {}
    for path, tensor in named_tensors([*call.inputs]) + named_tensors(call.kwargs):
        arrives = tensor.dtype
        if cast_to and tensor.is_floating_point():
            arrives = cast_to
        dtypes[path.lstrip(".")] = tensor.dtype, arrives
    return dtypes


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by the name of its class."""
    return "norm" in type(module).__name__.lower()


def _class_of(model: nn.Module) -> str:
    # `fully_shard` puts FSDP before the name of a class.
    return type(model).__name__.removeprefix("FSDP")
