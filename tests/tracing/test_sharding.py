"""`xray_sharding` against what hooks see in a step of two processes, for mistakes and not."""

import json
import re

import pytest
import sharded_setups as s
import torch
import torch.distributed as dist
from rank_processes import values_of
from torch import nn

from amp_lab import xray_sharding
from amp_lab.core.errors import TraceError
from amp_lab.tracing.sharded_step import group_of

RIGHT = (
    s.plain_fp32, s.norm_in_a_unit_of_its_own, s.norm_by_override, s.fp16_without_norms,
    s.trained_part_beside_a_frozen_one_in_bf16, s.inputs_that_stay_fp32, s.plain_ddp,
    s.frozen_in_fp32,
)  # fmt: skip
OTHERS = (s.reduce_dtype_left_out, s.ddp_that_ignores_a_weight)  # the table alone says it
AUTOCAST = {"ddp_under_autocast": s.plain_ddp}
MISTAKES = {  # and what is said of them
    s.policy_on_top_of_bf16: "without fp32 master weights",
    s.upcast_of_bf16: "cast to fp32 from bf16, which adds traffic",
    s.upcast_that_is_undone: "norm.weight, norm.bias: norm weights, stored in fp32 but",
    s.norm_in_bf16: "norm.weight, norm.bias: norm weights, stored in fp32 but computed in bf16",
    s.summed_in_bf16: "gradients are summed in bf16",
    s.two_stored_dtypes_in_a_unit: "fails at the first step. FSDP2 needs one stored dtype",
    s.root_left_out: "last.weight, last.bias: FSDP2 does not manage",
    s.buffer_in_fp32: "so these buffers stay in fp32",
    s.inputs_not_cast: "Inputs 0 reach the bf16 model in fp32",
    s.ddp_that_compresses: "gradients are summed in fp16",
}
SETUPS = {make.__name__: make for make in (*RIGHT, *MISTAKES, *OTHERS)} | AUTOCAST
RAISING = {"two_stored_dtypes_in_a_unit": "AssertionError", "inputs_not_cast": "RuntimeError"}


def said(found):
    """The same, as `xray_sharding` says it."""
    gathered, reduced = [], []
    for unit in found.units:
        own = found.parameters_in(unit.name)
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
            seen = s.seen_by_hooks(model, s.BF16 if low else None)
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
    assert dtypes["0.weight"] == (s.FP32, s.BF16, s.BF16, s.BF16)
    assert dtypes["1.weight"] == (s.FP32, s.FP32, s.FP32, s.BF16)
    assert not dist.is_initialized()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [b.dtype for b in found.buffers] == [s.FP32, s.FP32, torch.int64]


def test_autocast_decides_under_ddp_by_the_ops_of_the_device():
    x, given = torch.ones(2, 8), {"parallel": "ddp", "precision": "bf16"}
    computed = {p.name: p.computed for p in xray_sharding(s.Net(), x, **given).parameters}
    assert computed["first.weight"] is s.BF16
    assert computed["norm.weight"] is s.FP32
    found = xray_sharding(s.Net(), x, parallel="ddp", precision="fp32", reduce_dtype="fp16")
    assert {p.dtypes for p in found.parameters} == {(s.FP32, None, s.FP32, s.FP16)}


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
        ({}, "^Net .*neither .*'fsdp' or 'ddp'"),
        ({"parallel": "ddp"}, "depend on the ops: .*inputs"),
        ({"parallel": "fsdp", "reduce_dtype": "fp8"}, "^reduce_dtype 'fp8': .*fp32, fp16, bf16"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(settings, said):
    with pytest.raises(TraceError, match=said):
        xray_sharding(s.Net(), **settings)


def test_settings_beside_a_model_that_is_done_are_refused():
    with group_of(2):
        for model, settings, said in (
            (s.norm_in_bf16(), {"precision": "bf16"}, "is already sharded: leave out precision"),
            (s.norm_in_bf16(), {"parallel": "fsdp"}, "is already sharded: leave out parallel"),
            (s.plain_ddp(), {"reduce_dtype": "fp32"}, "is already in DDP: leave out reduce_dtype"),
        ):
            with pytest.raises(TraceError, match=re.escape(said)):
                xray_sharding(model, **settings)


def test_a_hook_of_ones_own_sums_in_a_dtype_that_is_not_guessed():
    with group_of(2):
        model = s.plain_ddp()
        model.register_comm_hook(None, my_hook)
        found = xray_sharding(model)
    assert {p.reduced for p in found.parameters} == {None}
    assert "hook 'my_hook' sums" in str(found)
    assert found.advice == []


def my_hook(state, bucket):
    raise NotImplementedError
