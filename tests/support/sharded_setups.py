"""Small models sharded by FSDP2 or in DDP, rightly and not, and what hooks see in their steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.parallel.collectives import count_communication

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HAS_OVERRIDE = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")


class Net(nn.Module):
    """Even sizes, which two ranks divide; it casts for itself where fp32 weights meet bf16."""

    def __init__(self, norm: bool = True, buffer: bool = False):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16) if norm else nn.Identity()
        self.last = nn.Linear(16, 4)
        if buffer:
            self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        x = self.first(x)
        if isinstance(self.norm, nn.LayerNorm):
            x = self.norm(x.to(self.norm.weight.dtype))
        if hasattr(self, "scale"):
            x = x * self.scale
            self.met = x.dtype
        if torch.is_autocast_enabled("cpu"):
            return self.last(x)
        return self.last(x.to(self.last.weight.dtype))


class Rotated(nn.Module):
    """Notes the dtype of a table that it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x, table):
        self.met = table.dtype
        return self.linear(x.to(self.linear.weight.dtype)) * table


class WithTable(nn.Module):
    """Hands a buffer to its part."""

    def __init__(self):
        super().__init__()
        self.part = Rotated()
        self.head = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    @property
    def met(self):
        return self.part.met

    def forward(self, x):
        x = self.part(x, self.table)
        return self.head(x.to(self.head.weight.dtype))


def policy(dtype=BF16, reduce=FP32, **more):
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, **more)


def shard(model, *parts, mp=None, of_parts=None, whole=True):
    """Each part is a unit of its own, and the model one of what is left."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mp = mp or policy()
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=of_parts or mp)
    return fully_shard(model, mesh=mesh, mp_policy=mp) if whole else model


# ------------------------------------------------------------------------- right ways


def plain_fp32():
    return shard(Net(), mp=MixedPrecisionPolicy())


def norm_in_a_unit_of_its_own():
    model = Net()
    return shard(model, model.norm, of_parts=MixedPrecisionPolicy(reduce_dtype=FP32))


def norm_by_override():
    if not HAS_OVERRIDE:
        return norm_in_a_unit_of_its_own()
    model = Net()
    norms = set(model.norm.parameters())
    mp = policy(param_dtype_override_fn=lambda p: p.dtype if p in norms else None)
    return shard(model, mp=mp)


def fp16_without_norms():
    model = Net(norm=False)
    return shard(model, model.first, mp=policy(FP16, output_dtype=FP32), of_parts=policy(FP16))


def trained_part_beside_a_frozen_one_in_bf16():
    model = Net(norm=False)
    model.first.to(BF16).requires_grad_(False)
    return shard(model, model.first)


def inputs_that_stay_fp32():
    model = Net(norm=False)
    root = MixedPrecisionPolicy(reduce_dtype=FP32, cast_forward_inputs=False)
    return shard(model, model.first, model.last, mp=root, of_parts=policy())


def buffer_that_a_unit_leaves_in_fp32():
    model = WithTable()
    return shard(model, model.part, of_parts=policy(cast_forward_inputs=False))


def plain_ddp():
    return DistributedDataParallel(Net())


# --------------------------------------------------------------------------- mistakes


def buffer_that_a_unit_casts():
    model = WithTable()
    return shard(model, model.part)


def policy_on_top_of_bf16():
    return shard(Net().to(BF16))


def upcast_of_bf16():
    return shard(Net(norm=False).to(BF16), mp=policy(FP32))


def upcast_that_is_undone():
    model = Net().to(BF16)
    model.norm.float()
    return shard(model, model.norm)


def norm_in_bf16():
    return shard(Net())


def summed_in_bf16():
    return shard(Net(norm=False), mp=policy(reduce=BF16))


def reduce_dtype_left_out():
    return shard(Net(norm=False), mp=policy(reduce=None))


def two_stored_dtypes_in_a_unit():
    model = Net()
    model.first.to(BF16)
    return shard(model)


def root_left_out():
    model = Net(norm=False)
    return shard(model, model.first, whole=False)


def frozen_in_fp32():
    model = Net(norm=False)
    model.first.requires_grad_(False)
    return shard(model, model.first)


def buffer_in_fp32():
    return shard(Net(norm=False, buffer=True))


def inputs_not_cast():
    return shard(Net(norm=False), mp=policy(cast_forward_inputs=False))


def ddp_that_compresses():
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


# ------------------------------------------------------------- as the remedies say to do it


def two_dtypes_in_units_of_their_own():
    model = Net()
    model.first.to(BF16)
    return shard(model, model.first)


def ddp_that_ignores_a_weight():
    model = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["last.weight"])
    return DistributedDataParallel(model)


def first_in_a_unit_of_its_own():
    model = Net(norm=False)
    return shard(model, model.first)


def fp32_stored_and_computed():
    return shard(Net(norm=False), mp=policy(FP32))


def fp32_under_a_policy():
    return shard(Net(norm=False))


def bf16_without_param_dtype():
    model = InputCastingNet(norm=False).to(BF16)
    return shard(model, mp=MixedPrecisionPolicy())


class CastingNet(Net):
    def forward(self, x):
        x = self.first(x)
        x = x * self.scale.to(x.dtype)
        self.met = x.dtype
        return self.last(x)


def buffer_that_forward_casts():
    return shard(CastingNet(norm=False, buffer=True))


class InputCastingNet(Net):
    def forward(self, x):
        return super().forward(x.to(self.first.weight.dtype))


def inputs_that_forward_casts():
    return shard(InputCastingNet(norm=False), mp=policy(cast_forward_inputs=False))


class Normed(nn.Sequential):
    """With running statistics."""

    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


# ------------------------------------------------------------------ what a step really does


class Casts(TorchDispatchMode):
    """Notes what autocast casts, by where it lies."""

    def __init__(self):
        super().__init__()
        self.to = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.to[args[0].data_ptr()] = out.dtype
        return out


def seen_by_hooks(model, dtype):
    """The dtypes of a real step; without a policy, under autocast to `dtype` if there is one."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    seen = {"stored": {n: p.dtype for n, p in inner.named_parameters()}, "buffers": {}}
    used, places = {}, {}

    def note(module, args):
        name = names[module]
        seen.setdefault("inputs", args[0].dtype)  # of the model, whose hook is the first
        for own, parameter in module.named_parameters(recurse=False):
            used[f"{name}.{own}"] = parameter.dtype
            places[f"{name}.{own}"] = parameter.data_ptr()
        seen["buffers"] |= {own: b.dtype for own, b in module.named_buffers(recurse=False)}

    names = {module: name for name, module in inner.named_modules()}
    for module in names:
        module.register_forward_pre_hook(note)  # after FSDP2's own, which come first
    autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)
    with count_communication() as forward, Casts() as casts, autocast:
        output = model(torch.ones(2, 8))
    with count_communication() as backward:
        output.float().square().mean().backward()
    # Without autocast nothing casts weights, and where gathered ones lay there are others by now.
    to = casts.to if dtype is not None else {}
    seen["computed"] = {name: to.get(places[name], own) for name, own in used.items()}
    seen["gathered"] = sent(forward, "all_gather")
    seen["reduced"] = sent(backward, "reduce_scatter") or sent(backward, "all_reduce")
    return seen


def sent(communication, kind):
    return sorted((str(c.dtype), c.elements) for c in communication.calls if c.kind == kind)
