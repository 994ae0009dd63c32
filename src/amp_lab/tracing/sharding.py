"""The dtypes in which FSDP2 or DDP stores, gathers, computes and sums each parameter of a model."""

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_lab.core.errors import TraceError
from amp_lab.core.precision import Precision
from amp_lab.core.tensors import LOWER_DTYPES, named_tensors
from amp_lab.core.torch_versions import fsdp_groups, fsdp_reduced_dtype
from amp_lab.model_call import ModelCall
from amp_lab.parallel.ranks import REDUCE_DTYPES, Parallel
from amp_lab.tracing.fake_device import checked_backend, on_fake_device, require_model
from amp_lab.tracing.sharded_step import group_of, sharded
from amp_lab.tracing.sharding_result import ShardedBuffer, ShardedParameter, ShardingXray, Unit
from amp_lab.tracing.xray import xray_call

# torch's communication hooks for DDP, with the dtype in which they sum gradients.
_COMPRESS_HOOKS = {"bf16_compress_hook": torch.bfloat16, "fp16_compress_hook": torch.float16}
_RANKS = 2  # more ranks do not change any dtype


def xray_sharding(
    model: nn.Module,
    *inputs: Any,
    parallel: str | None = None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    device_type: str = "cuda",
    **kwargs: Any,
) -> ShardingXray:
    """Show in which dtype FSDP2 or DDP stores, gathers, computes and sums each parameter.

    A model that is already in DDP or sharded by `fully_shard` is not changed. Any other model is
    wrapped or sharded as in `amp-lab train`. No other process is started.

    Args:
        model: The model: sharded by `fully_shard`, in DistributedDataParallel, or neither.
        *inputs: The positional arguments of a call. The result shows to which dtype the inputs are
            cast. Autocast under DDP needs inputs.
        parallel: "fsdp" or "ddp", for a model that is neither sharded nor in DDP.
        precision: A `Precision`. If None, it is bf16; for a model that is already in DDP, autocast
            is off.
        reduce_dtype: The name of the dtype in which gradients are summed. The default is fp32.
        device_type: The device type whose autocast is used under DDP.
        **kwargs: The keyword arguments of the call.

    Returns:
        A `ShardingXray`. Print it to see the dtypes of each unit, and advice.

    Raises:
        TraceError: If FSDP1 wraps the model, if `parallel` is missing, if the model already has a
            setting that you give, if `reduce_dtype` is unknown, or if autocast has no inputs.
        DeviceError: If the device type does not exist.
        ValueError: If `precision` is not a `Precision`.

    Example:
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
        print(xray_sharding(model, torch.empty(2, 8), parallel="ddp", precision="bf16"))
    """
    checked_backend(device_type)
    call = ModelCall(model, inputs, kwargs)
    # A model that is sharded or in DDP already has these settings. Only the precision of autocast
    # around DDP is not part of the model.
    if parallel_of(model) is Parallel.FSDP:
        settings = {"parallel": parallel, "reduce_dtype": reduce_dtype, "precision": precision}
        _require_unset("sharded", settings)
        return _read_fsdp(call)
    if isinstance(model, DistributedDataParallel):
        _require_unset("in DDP", {"parallel": parallel, "reduce_dtype": reduce_dtype})
        return _read_ddp(model, call, Precision(precision or Precision.FP32), device_type)
    train_precision = Precision(precision or Precision.BF16)
    return _xray_as_in_train(call, parallel, train_precision, reduce_dtype or "fp32", device_type)


def _xray_as_in_train(
    call: ModelCall,
    parallel: str | None,
    precision: Precision,
    reduce_dtype: str,
    device_type: str,
) -> ShardingXray:
    """The X-ray of a plain model, put in DDP or sharded as `amp-lab train` would do it.

    Raises `TraceError` if the model is not a module, or for an unknown `parallel` or
    `reduce_dtype`.
    """
    model = call.model
    require_model(model)
    if reduce_dtype not in REDUCE_DTYPES:
        raise TraceError(f"reduce_dtype {reduce_dtype!r}: give one of {', '.join(REDUCE_DTYPES)}")
    if parallel == Parallel.DDP:
        # DDP sums gradients in their own dtype, for which None stands, unless a hook casts them.
        hook_dtype = None if reduce_dtype == "fp32" else REDUCE_DTYPES[reduce_dtype]
        return _ddp_xray(call, precision, device_type, hook_dtype)
    if parallel != Parallel.FSDP:
        name = type(model).__name__
        raise TraceError(f"{name} is neither sharded nor in DDP: give parallel='fsdp' or 'ddp'")
    # If this process is in a group already, the model is sharded over that one.
    group = nullcontext() if dist.is_initialized() else group_of(_RANKS)
    with group, on_fake_device(ModelCall(model), "cpu") as run:
        sharded_copy = sharded(model, run.parameters | run.buffers, precision, reduce_dtype)
        return _read_fsdp(ModelCall(sharded_copy, call.args, call.kwargs))


def _require_unset(state: str, settings: dict[str, str | None]) -> None:
    """Raise `TraceError` if the caller gives a setting that the model has already.

    `state` says why the model has it: "sharded" or "in DDP". A setting is not given if it is None.
    """
    for name, value in settings.items():
        if value is not None:
            raise TraceError(f"the model is already {state}: leave out {name}")


def parallel_of(model: nn.Module) -> Parallel | None:
    """Whether a model is sharded by FSDP2 or in DDP; None for neither.

    Raises `TraceError` for a model of FSDP1.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # take a second to load

    if not isinstance(model, nn.Module):
        return None
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise TraceError(
            "FullyShardedDataParallel (FSDP1) is not supported: shard the model with fully_shard"
        )
    if any(isinstance(module, FSDPModule) for module in modules):
        return Parallel.FSDP
    if isinstance(model, DistributedDataParallel):
        return Parallel.DDP
    return None


def _read_fsdp(call: ModelCall) -> ShardingXray:
    """The X-ray of a model that `fully_shard` has sharded.

    Each call of `fully_shard` made a unit: modules whose parameters are gathered together.
    """
    model = call.model
    names = {module: name for name, module in model.named_modules()}
    units: list[Unit] = []
    unit_of: dict[str, str] = {}  # name of a module: name of its unit
    parameters: list[ShardedParameter] = []
    all_groups: list[Any] = []  # FSDP2's groups of parameters, of all units
    for state, modules in _states(model).items():
        module_names = [names[module] for module in modules]
        groups = fsdp_groups(state)
        unit = _unit(", ".join(module_names), state._mp_policy, groups)
        units.append(unit)
        unit_of |= dict.fromkeys(module_names, unit.name)
        for group in groups:
            parameters += _parameters_of_group(model, group, unit.name, names)
        all_groups += groups
    # A parameter in no group is not sharded: each rank has all of it.
    sharded_ids = _ids_of_parameters(all_groups)
    for name, parameter in model.named_parameters():
        if id(parameter) not in sharded_ids:
            row = _row(model, name, parameter, unit=None, computed=parameter.dtype)
            parameters.append(row)
    # The unit of the model itself, whose name is "", casts the inputs.
    input_dtypes = [unit.inputs for unit in units if unit.name == ""]
    input_dtype = input_dtypes[0] if input_dtypes else None
    return _make_xray(call, "FSDP2", units, parameters, unit_of, input_dtype)


def _ids_of_parameters(groups: list[Any]) -> set[int]:
    """The `id` of each parameter of the model that is in one of FSDP2's groups."""
    ids = set()
    for group in groups:
        for fsdp_param in group.fsdp_params:
            # The model's parameter is one of these two: the second while it is gathered.
            ids.add(id(fsdp_param.sharded_param))
            ids.add(id(getattr(fsdp_param, "_unsharded_param", None)))
    return ids


def _states(model: nn.Module) -> dict[Any, list[nn.Module]]:
    """FSDP2's state of each call of `fully_shard`, with the modules that this call got."""
    from torch.distributed.fsdp import FSDPModule

    modules_of: dict[Any, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            modules_of.setdefault(module._get_fsdp_state(), []).append(module)
    return modules_of


def _unit(name: str, policy: Any, groups: list[Any]) -> Unit:
    """The unit of one call of `fully_shard`, and the error that its first step would raise.

    `policy` is its `MixedPrecisionPolicy`, and `groups` are FSDP2's groups of its parameters.
    """
    refusal = None
    for group in groups:
        try:
            group._init_mp_dtypes()  # sets and checks the dtypes, as the first step does
        except AssertionError as error:
            refusal = str(error)
    return Unit(
        name,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        refusal=refusal,
    )


def _parameters_of_group(
    model: nn.Module, group: Any, unit: str, names: dict[nn.Module, str]
) -> Iterator[ShardedParameter]:
    """The rows of the parameters in `group`, a group of FSDP2 that is gathered together.

    `unit` is the name of its unit, and `names` has the names of all modules of the model.
    """
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    reduced = None
    if trained:
        # Newer versions of torch take several dtypes in a group; the widest holds all the sums.
        reduced_dtypes = [fsdp_reduced_dtype(fsdp_param) for fsdp_param in trained]
        reduced = functools.reduce(torch.promote_types, reduced_dtypes)
    for fsdp_param in group.fsdp_params:
        info = fsdp_param._module_info
        name = f"{names[info.module]}.{info.param_name}".removeprefix(".")
        computed = fsdp_param.param_dtype or fsdp_param.orig_dtype
        # A weight of torchao in FP8 or MX gathers itself, in a dtype of its own.
        gathers_itself = hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather")
        gathered = None if gathers_itself else computed
        yield _row(model, name, fsdp_param.sharded_param, unit, computed, gathered, reduced)


def _read_ddp(
    ddp: DistributedDataParallel, call: ModelCall, precision: Precision, device_type: str
) -> ShardingXray:
    """The X-ray of a model that is in DDP: reads its communication hook and ignored parameters.

    Raises `TraceError` for a model in DDP's own mixed precision.
    """
    if ddp.mixed_precision is not None:
        raise TraceError("the mixed_precision of DDP is not supported: use autocast instead")
    hook_dtype = None
    unknown_hook = None
    for hook, _ in ddp._comm_hooks:  # one at most
        name = getattr(hook, "__name__", type(hook).__name__)
        hook_dtype = _COMPRESS_HOOKS.get(name)
        # A hook that is not torch's may do anything with gradients, so its dtype is not known.
        unknown_hook = None if hook_dtype else name
    unwrapped = ModelCall(ddp.module, call.args, call.kwargs)
    ignored = ddp.parameters_to_ignore
    return _ddp_xray(unwrapped, precision, device_type, hook_dtype, unknown_hook, ignored)


def _ddp_xray(
    call: ModelCall,
    precision: Precision,
    device_type: str,
    hook_dtype: torch.dtype | None,
    unknown_hook: str | None = None,
    ignored: frozenset[str] | set[str] = frozenset(),
) -> ShardingXray:
    """The X-ray of a model as it runs in DDP, under autocast to `precision`.

    Args:
        call: A call of the model without the wrapper of DDP.
        precision: The precision of autocast; fp32 is without autocast.
        device_type: The device type whose autocast is used.
        hook_dtype: The dtype to which a communication hook casts gradients before they are summed.
            None: they are summed in their own dtype.
        unknown_hook: The name of a hook that is not torch's, so that its dtype is not known.
        ignored: The names of the parameters whose gradients DDP does not sum.
    """
    autocast_dtypes = _autocast_dtypes(call, precision, device_type)
    parameters = []
    for name, parameter in call.model.named_parameters():
        unit = None if name in ignored else ""  # the whole model is one unit
        computed = autocast_dtypes.get(name, parameter.dtype)
        reduced = None
        if name not in ignored and unknown_hook is None:
            reduced = hook_dtype or parameter.dtype
        row = _row(call.model, name, parameter, unit, computed, reduced=reduced)
        parameters.append(row)
    return _make_xray(
        call,
        "DDP",
        [Unit("")],
        parameters,
        unit_of={"": ""},  # all buffers are in the one unit, which is the model itself
        input_dtype=None,
        hook=unknown_hook,
    )


def _autocast_dtypes(
    call: ModelCall, precision: Precision, device_type: str
) -> dict[str, torch.dtype]:
    """The dtype to which autocast casts a parameter, by name, for each parameter that it casts.

    Empty if autocast is off. Raises `TraceError` for a call without inputs, and for a model that
    fails under autocast.
    """
    dtype = precision.dtype
    if dtype not in LOWER_DTYPES:
        return {}
    if not call.args and not call.kwargs:
        raise TraceError("the casts of autocast depend on the ops: give the inputs of a call")
    result = xray_call(call, device_type, dtype)
    if result.raised is not None:
        raise TraceError(result.raised)
    casts = [cast for cast in result.casts if cast.is_of_parameter]
    return {cast.what.removeprefix("parameter "): cast.to_dtype for cast in casts}


def _row(
    model: nn.Module,
    name: str,
    parameter: torch.Tensor,
    unit: str | None,
    computed: torch.dtype,
    gathered: torch.dtype | None = None,
    reduced: torch.dtype | None = None,
) -> ShardedParameter:
    """The row of a parameter of `model`; the other arguments are as in `ShardedParameter`."""
    return ShardedParameter(
        name=name,
        unit=unit,
        stored=parameter.dtype,
        gathered=gathered,
        computed=computed,
        reduced=reduced if parameter.requires_grad else None,
        trained=parameter.requires_grad,
        elements=parameter.numel(),
        of_norm=_is_of_norm(model, name),
    )


def _make_xray(
    call: ModelCall,
    kind: str,
    units: list[Unit],
    parameters: list[ShardedParameter],
    unit_of: dict[str, str],
    input_dtype: torch.dtype | None,
    hook: str | None = None,
) -> ShardingXray:
    """The X-ray of these units and parameters, with the buffers and inputs of the call.

    Args:
        call: A call of the model.
        kind: "FSDP2" or "DDP".
        units: As in `ShardingXray`.
        parameters: As in `ShardingXray`.
        unit_of: For each module that `fully_shard` got, by its name, the name of its unit.
        input_dtype: The dtype to which floating-point inputs are cast; None: they are not cast.
        hook: As in `ShardingXray`.
    """
    model = call.model
    buffers = []
    for name, buffer in model.named_buffers():
        # A buffer is in the unit of its module, or of the nearest module around it that has one.
        module = name.rpartition(".")[0]
        while module and module not in unit_of:
            module = module.rpartition(".")[0]
        of_norm = _is_of_norm(model, name)
        buffers.append(ShardedBuffer(name, unit_of.get(module), buffer.dtype, of_norm))
    inputs = {}
    # An input without a name has a number: ``0``, or ``0.image`` inside a dict.
    for path, tensor in named_tensors([*call.args]) + named_tensors(call.kwargs):
        arriving_dtype = tensor.dtype
        if input_dtype is not None and tensor.is_floating_point():
            arriving_dtype = input_dtype
        inputs[path.lstrip(".")] = (tensor.dtype, arriving_dtype)
    return ShardingXray(
        model=type(model).__name__.removeprefix("FSDP"),  # which `fully_shard` puts before it
        kind=kind,
        units=units,
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        hook=hook,
    )


def _is_of_norm(model: nn.Module, name: str) -> bool:
    """Whether the module of a parameter or buffer is a norm, by the name of its class."""
    module = model.get_submodule(name.rpartition(".")[0])
    return "norm" in type(module).__name__.lower()
