"""`xray_sharding` against what hooks see in a step of two processes, for mistakes and not."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from rank_processes import values_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab import xray_sharding
from amp_lab.distributed.collectives import count_communication
from amp_lab.errors import TraceError
from amp_lab.tracing.sharded_step import group_of

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HAS_OVERRIDE = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")
# Where `reduce_dtype` is left out, gradients of fp32 weights are summed in fp32 from 2.15 on.
SUMS_IN_FP32 = torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)


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
        x = x * self.scale if hasattr(self, "scale") else x
        if torch.is_autocast_enabled("cpu"):
            return self.last(x)
        return self.last(x.to(self.last.weight.dtype))


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


def plain_ddp():
    return DistributedDataParallel(Net())


RIGHT = (
    plain_fp32, norm_in_a_unit_of_its_own, norm_by_override, fp16_without_norms,
    trained_part_beside_a_frozen_one_in_bf16, inputs_that_stay_fp32, plain_ddp,
)  # fmt: skip
AUTOCAST = {"ddp_under_autocast": plain_ddp}


# --------------------------------------------------------------------------- mistakes


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


MISTAKES = {  # and what is said of them
    policy_on_top_of_bf16: "there are no fp32 master weights",
    upcast_of_bf16: "cast to fp32 from bf16, which adds no digits",
    upcast_that_is_undone: "norm.weight, norm.bias: in fp32 in a model of bf16, and cast back",
    norm_in_bf16: "norm.weight, norm.bias: weights of norms, stored in fp32 and computed in bf16",
    summed_in_bf16: "gradients are summed in bf16",
    reduce_dtype_left_out: "reduce_dtype is left out"
    if SUMS_IN_FP32
    else "gradients are summed in bf16",
    two_stored_dtypes_in_a_unit: "fails at the first step, since FSDP2 takes one stored dtype",
    root_left_out: "last.weight, last.bias: in no unit",
    frozen_in_fp32: "first.weight, first.bias: frozen, stored in fp32 and computed in bf16",
    buffer_in_fp32: "scale: buffers stay in fp32",
    inputs_not_cast: "Inputs 0 reach the model in fp32",
    ddp_that_compresses: "gradients are summed in fp16",
}
SETUPS = {make.__name__: make for make in (*RIGHT, *MISTAKES)} | AUTOCAST
RAISING = {"two_stored_dtypes_in_a_unit": "AssertionError", "inputs_not_cast": "RuntimeError"}


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


def said(found):
    """The same, as `xray_sharding` says it."""
    gathered, reduced = [], []
    for unit in found.units:
        own = found.of(unit.name)
        values, dtypes = sum(p.elements for p in own), {p.gathered for p in own} - {None}
        if len(dtypes) > 1:  # they are sent together, as bytes
            values, dtypes = sum(p.elements * p.gathered.itemsize for p in own), {torch.uint8}
        gathered += [(str(dtype), values) for dtype in dtypes]
        trained = [p for p in own if p.reduced is not None]
        reduced += [
            (str(d), sum(p.elements for p in trained)) for d in {p.reduced for p in trained}
        ]
    return {
        "stored": {p.name: p.stored for p in found.parameters},
        "buffers": {b.name: b.dtype for b in found.buffers},
        "inputs": found.inputs["0"][1],
        "computed": {p.name: p.computed for p in found.parameters},
        "gathered": sorted(gathered),
        "reduced": sorted(reduced),
    }


def observe():
    """For each way: what is said, the remarks, and what hooks see or the step raises."""
    dist.init_process_group("gloo")
    found = {}
    for name, make in SETUPS.items():
        torch.manual_seed(0)
        model, low = make(), name in AUTOCAST
        settings = {"precision": "bf16", "device_type": "cpu"} if low else {}
        answer = xray_sharding(model, torch.ones(2, 8), **settings)
        try:
            seen = seen_by_hooks(model, BF16 if low else None)
        except (AssertionError, RuntimeError) as error:
            seen = type(error).__name__
        found[name] = said(answer), answer.advice, seen
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def observed():
    return values_of(observe, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_it_says_what_hooks_see_in_a_step_of_two_processes(observed, name):
    for rank in observed:
        answer, _, seen = rank[name]
        assert seen == RAISING.get(name, answer)


@pytest.mark.slow
@pytest.mark.parametrize("make", MISTAKES, ids=lambda make: make.__name__)
def test_a_mistake_is_told_of(observed, make):
    _, advice, _ = observed[0][make.__name__]
    assert any(MISTAKES[make] in line for line in advice), advice


@pytest.mark.slow
@pytest.mark.parametrize("name", [*[make.__name__ for make in RIGHT], *AUTOCAST])
def test_there_is_nothing_to_say_of_a_right_way(observed, name):
    assert observed[0][name][1] == []


# ---------------------------------------------------------------- without any other process


def test_a_plain_model_is_taken_as_train_would():
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = xray_sharding(model, torch.ones(1, 1, 2, 2), parallel="fsdp", reduce_dtype="bf16")
    dtypes = {p.name: (p.stored, p.gathered, p.computed, p.reduced) for p in found.parameters}
    assert dtypes["0.weight"] == (FP32, BF16, BF16, BF16)
    assert dtypes["1.weight"] == (FP32, FP32, FP32, BF16)
    assert not dist.is_initialized()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [b.dtype for b in found.buffers] == [FP32, FP32, torch.int64]


def test_autocast_decides_under_ddp_by_the_ops_of_the_device():
    x, given = torch.ones(2, 8), {"parallel": "ddp", "precision": "bf16"}
    computed = {p.name: p.computed for p in xray_sharding(Net(), x, **given).parameters}
    assert computed["first.weight"] is BF16
    assert computed["norm.weight"] is FP32
    found = xray_sharding(Net(), x, parallel="ddp", precision="fp32", reduce_dtype="fp16")
    assert {p.dtypes for p in found.parameters} == {(FP32, None, FP32, FP16)}


class Block(nn.Sequential):
    """A block, of which `train` makes a unit; its norms are one together."""


def test_units_alike_share_a_line_and_json_has_all():
    blocks = [Block(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)) for _ in range(12)]
    found = xray_sharding(nn.Sequential(nn.Linear(4, 4), *blocks), parallel="fsdp")
    rows = [re.split("  +", line) for line in str(found).splitlines()[4:7]]
    assert [row[:3] for row in rows] == [
        ["the model", "0.weight, 0.bias", "20"],
        ["*, 12 units", "0.weight, 0.bias", "240"],
        ["*.*, *.*, 12 units", "1.weight, 1.bias and 2 more", "192"],
    ]
    parameters = json.loads(found.to_json())["parameters"]
    assert len(parameters) == 2 + 12 * 6
    assert parameters[0]["reduced"] == "float32"
    assert "| *, 12 units | 0.weight, 0.bias | 240 |" in found.to_markdown()


def test_a_tied_weight_is_in_its_unit_once():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    found = xray_sharding(model, parallel="fsdp")
    assert [(p.name, p.unit) for p in found.parameters] == [("0.weight", "")]
    assert found.advice == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "Net is neither sharded nor in DDP: give parallel='fsdp' or 'ddp'"),
        ({"parallel": "ddp"}, "depends on the ops: give the inputs of a call"),
        ({"parallel": "fsdp", "reduce_dtype": "fp8"}, "'fp8': give one of fp32, fp16, bf16"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(settings, said):
    with pytest.raises(TraceError, match=re.escape(said)):
        xray_sharding(Net(), **settings)


def test_settings_beside_a_model_that_is_done_are_refused():
    with group_of(2):
        for model, settings, said in (
            (norm_in_bf16(), {"precision": "bf16"}, "is sharded already: leave out precision"),
            (norm_in_bf16(), {"parallel": "fsdp"}, "is sharded already: leave out parallel"),
            (plain_ddp(), {"reduce_dtype": "fp32"}, "is in DDP already: leave out reduce_dtype"),
        ):
            with pytest.raises(TraceError, match=re.escape(said)):
                xray_sharding(model, **settings)


def test_a_hook_of_ones_own_sums_in_a_dtype_that_is_not_guessed():
    with group_of(2):
        model = plain_ddp()
        model.register_comm_hook(None, my_hook)
        found = xray_sharding(model)
    assert {p.reduced for p in found.parameters} == {None}
    assert "summed by 'my_hook', in a dtype that only a step shows" in str(found)
    assert found.advice == []


def my_hook(state, bucket):
    raise NotImplementedError
