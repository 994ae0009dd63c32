"""In which dtypes a model under FSDP2 or DDP is kept, gathered, computed and summed."""

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_lab.distributed.ranks import REDUCE_DTYPES, Parallel
from amp_lab.errors import TraceError
from amp_lab.precision import Precision
from amp_lab.torch_versions import fsdp_groups, fsdp_reduced_dtype
from amp_lab.tracing.fake_device import checked_backend, on_fake_device, require_model
from amp_lab.tracing.ops_seen import LOWER_DTYPES
from amp_lab.tracing.sharded_step import group_of, sharded
from amp_lab.tracing.sharding_result import ShardedBuffer, ShardedParameter, ShardingXray, Unit
from amp_lab.tracing.structures import named_tensors
from amp_lab.tracing.xray import xray

_HOOKS = {"bf16_compress_hook": torch.bfloat16, "fp16_compress_hook": torch.float16}
_RANKS = 2  # more make no difference to a dtype


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
    given = inputs, kwargs
    kind = parallel_of(model)
    settings = {"parallel": parallel, "reduce_dtype": reduce_dtype}
    settings |= {"precision": precision} if kind is Parallel.FSDP else {}
    if kind is not None and any(settings.values()):
        named = next(name for name, value in settings.items() if value is not None)
        how = "sharded" if kind is Parallel.FSDP else "in DDP"
        raise TraceError(f"the model is {how} already: leave out {named}")
    if kind is Parallel.FSDP:
        return _read_fsdp(model, given)
    wanted = None if precision is None else Precision(precision)
    if isinstance(model, DistributedDataParallel):
        return _read_ddp(model, given, wanted or Precision.FP32, device_type)
    require_model(model)
    wanted, reduce_dtype = wanted or Precision.BF16, reduce_dtype or "fp32"
    if reduce_dtype not in REDUCE_DTYPES:
        raise TraceError(f"reduce_dtype {reduce_dtype!r}: give one of {', '.join(REDUCE_DTYPES)}")
    if parallel == Parallel.DDP:
        reduced = None if reduce_dtype == "fp32" else REDUCE_DTYPES[reduce_dtype]
        return _ddp(model, given, _computed_in(model, given, wanted, device_type), reduced)
    if parallel != Parallel.FSDP:
        name = type(model).__name__
        raise TraceError(f"{name} is neither sharded nor in DDP: give parallel='fsdp' or 'ddp'")
    # In a group that there is, such as the command's, it is sharded over that.
    alone = nullcontext() if dist.is_initialized() else group_of(_RANKS)
    with alone, on_fake_device(model, (), {}, "cpu") as run:
        tensors = run.parameters | run.buffers
        return _read_fsdp(sharded(model, tensors, wanted, reduce_dtype), given)


def parallel_of(model: nn.Module) -> Parallel | None:
    """How a model is shared among processes already; None: it is not."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # take a second to load

    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise TraceError("FullyShardedDataParallel is FSDP1: shard the model with fully_shard")
    if any(isinstance(module, FSDPModule) for module in modules):
        return Parallel.FSDP
    return Parallel.DDP if isinstance(model, DistributedDataParallel) else None


def _read_fsdp(model: nn.Module, given: tuple) -> ShardingXray:
    names = {module: name for name, module in model.named_modules()}
    units, parameters, unit_of, managed = [], [], {}, set()
    for state, modules in _states(model).items():
        unit = _unit(", ".join(names[module] for module in modules), state)
        units.append(unit)
        unit_of |= dict.fromkeys([names[module] for module in modules], unit.name)
        for group in fsdp_groups(state):
            parameters += _of_group(group, unit.name, names)
            for own in group.fsdp_params:  # while it is gathered, the whole one is the module's
                managed |= {id(own.sharded_param), id(getattr(own, "_unsharded_param", None))}
    alone = [(name, own) for name, own in model.named_parameters() if id(own) not in managed]
    parameters += [_parameter(model, name, own, own.dtype, None) for name, own in alone]
    whole = next((unit for unit in units if not unit.name), Unit(""))
    return ShardingXray(
        model=_class_of(model),
        kind="FSDP2",
        units=units,
        parameters=parameters,
        buffers=_buffers(model, unit_of),
        inputs=_inputs(given, whole.inputs),
    )


def _states(model: nn.Module) -> dict[Any, list[nn.Module]]:
    """What FSDP2 keeps of each unit, with its modules: `fully_shard` takes several together."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[Any, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            found.setdefault(module._get_fsdp_state(), []).append(module)
    return found


def _unit(name: str, state: Any) -> Unit:
    policy, refusal = state._mp_policy, None
    for group in fsdp_groups(state):
        try:
            group._init_mp_dtypes()  # as the first step does: it sets dtypes, the same every time
        except AssertionError as error:
            refusal = str(error)
    dtypes = policy.param_dtype, policy.reduce_dtype, policy.output_dtype
    return Unit(name, *dtypes, policy.cast_forward_inputs, refusal)


def _of_group(group: Any, unit: str, names: dict[nn.Module, str]) -> Iterator[ShardedParameter]:
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    dtypes = [fsdp_reduced_dtype(p) for p in trained]
    # Of several, which only newer versions take, the one that holds them all.
    reduced = functools.reduce(torch.promote_types, dtypes) if dtypes else None
    for own in group.fsdp_params:
        info, low = own._module_info, own.param_dtype or own.orig_dtype
        is_trained = own.sharded_param.requires_grad
        yield ShardedParameter(
            name=f"{names[info.module]}.{info.param_name}".removeprefix("."),
            unit=unit,
            stored=own.orig_dtype,
            # A weight of torchao in FP8 or MX gathers itself, in a dtype of its own.
            gathered=None if hasattr(own._sharded_local_tensor, "fsdp_pre_all_gather") else low,
            computed=low,
            reduced=reduced if is_trained else None,
            trained=is_trained,
            elements=own.sharded_param.numel(),
            of_norm=_is_norm(info.module),
        )


def _read_ddp(
    ddp: DistributedDataParallel, given: tuple, precision: Precision, device_type: str
) -> ShardingXray:
    if ddp.mixed_precision is not None:
        raise TraceError("DDP's own mixed_precision is not read: use autocast instead")
    hooks = [getattr(hook, "__name__", type(hook).__name__) for hook, _ in ddp._comm_hooks]
    known = [_HOOKS.get(name) for name in hooks]
    unknown = next((name for name in hooks if name not in _HOOKS), None)
    computed = _computed_in(ddp.module, given, precision, device_type)
    ignored = ddp.parameters_to_ignore
    return _ddp(ddp.module, given, computed, known[0] if known else None, unknown, ignored)


def _ddp(
    model: nn.Module,
    given: tuple,
    computed: dict[str, torch.dtype],
    reduced: torch.dtype | None,
    hook: str | None = None,
    ignored: frozenset[str] | set[str] = frozenset(),
) -> ShardingXray:
    """The table of a model in DDP; gradients are summed in their own dtype without `reduced`."""
    parameters = []
    for name, own in model.named_parameters():
        unit = None if name in ignored else ""
        dtype = None if hook is not None or unit is None else reduced or own.dtype
        parameters.append(_parameter(model, name, own, computed.get(name, own.dtype), unit, dtype))
    return ShardingXray(
        model=_class_of(model),
        kind="DDP",
        units=[Unit("")],
        parameters=parameters,
        buffers=_buffers(model, {"": ""}),
        inputs=_inputs(given, None),
        hook=hook,
    )


def _computed_in(
    model: nn.Module, given: tuple, precision: Precision, device_type: str
) -> dict[str, torch.dtype]:
    """What autocast casts parameters to."""
    if precision.dtype not in LOWER_DTYPES:
        return {}
    inputs, kwargs = given
    if not inputs and not kwargs:
        raise TraceError("what autocast casts depends on the ops: give the inputs of a call")
    seen = xray(model, *inputs, device_type=device_type, dtype=precision.dtype, **kwargs)
    if seen.raised is not None:
        raise TraceError(seen.raised)
    casts = [cast for cast in seen.casts if cast.is_of_parameter]
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
    norm = _is_norm(model.get_submodule(name.rpartition(".")[0]))
    dtypes = own.dtype, None, computed, reduced if own.requires_grad else None
    return ShardedParameter(name, unit, *dtypes, own.requires_grad, own.numel(), norm)


def _buffers(model: nn.Module, unit_of: dict[str, str]) -> list[ShardedBuffer]:
    """The buffers, each with the unit of the innermost module around it that is of one."""
    found = []
    for name, buffer in model.named_buffers():
        owner = around = name.rpartition(".")[0]
        while around and around not in unit_of:
            around = around.rpartition(".")[0]
        norm = _is_norm(model.get_submodule(owner))
        found.append(ShardedBuffer(name, unit_of.get(around), buffer.dtype, norm))
    return found


def _inputs(given: tuple, cast: torch.dtype | None) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """The dtype of each input, and the one in which the model gets it."""
    inputs, kwargs = given
    tensors = named_tensors([*inputs]) + named_tensors(kwargs)
    return {
        name.lstrip("."): (t.dtype, cast if cast and t.dtype.is_floating_point else t.dtype)
        for name, t in tensors
    }


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _class_of(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")  # its class is changed by `fully_shard`
