"""Notebook 14: counts of casts in a trace, the log of ops, and an island's gradient."""

import json

import pytest
import torch
from definitions import definitions

import build_pairs

SOURCE = build_pairs.FOLDER / "14_ten_practices.py"
SETTINGS = {"fp32", "names", "SHORT"}

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


@pytest.fixture
def cells() -> dict:
    """The notebook's definitions."""
    return definitions(SOURCE, SETTINGS, device=torch.device("cpu"))


def test_casts_are_copies_between_two_dtypes(cells):
    def copy(*kinds):
        return {"name": "aten::copy_", "args": {"Input type": [*kinds, "Scalar"]}}

    events = [
        {"name": "process_name", "ph": "M"},
        {"name": "aten::mm", "args": {"Input type": ["c10::BFloat16", "c10::BFloat16"]}},
        copy("c10::BFloat16", "float"),
        copy("float", "float"),
        copy("float", "long int"),
        {"name": "aten::empty", "args": {"Input type": []}},
    ]
    ops = cells["count_ops"](events)
    assert ops["mm", "bf16"] == 1
    assert ops["copy_", "fp32"] == 2
    assert {key: n for key, n in ops.items() if key[0] == "cast"} == {("cast", "bf16"): 1}


def test_a_trace_of_two_casts_and_a_matmul_is_counted(cells):
    x = torch.ones(2, 2)
    _, events = cells["profile_once"](lambda: x.bfloat16() @ x.bfloat16())
    ops = cells["count_ops"](events)
    assert (ops["mm", "bf16"], ops["cast", "bf16"]) == (1, 2)


def test_the_log_of_ops_has_matmuls_with_their_dtype(cells):
    with cells["OpLog"]() as log:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert log.matmuls() == ["fp32"]
    assert (log.count("mm"), log.count("_to_copy")) == (1, 0)


def test_backward_inside_the_block_rounds_an_island(cells):
    logs = {inside: cells["OpLog"]() for inside in (False, True)}
    found = {inside: cells["island_gradient"](inside, 16, log) for inside, log in logs.items()}
    assert logs[False].matmuls() == ["fp32", "fp32", "bf16"]
    assert logs[True].matmuls() == ["bf16"] * 3
    assert torch.equal(found[False], cells["island_gradient"](False, 16))
    assert not torch.equal(found[False], found[True])


def test_a_trace_has_the_dtypes_of_tensors_and_none_of_lists(tmp_path):
    """What `record_shapes` notes of an op: what it takes, one by one."""
    a = torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.profiler.profile(record_shapes=True) as profiled:
        torch.mm(a, a)
        torch.cat([a, a])
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    kinds = {event["name"]: event["args"].get("Input type") for event in events if "args" in event}
    assert kinds["aten::mm"] == ["c10::BFloat16"] * 2
    assert kinds["aten::cat"][0] == "TensorList"
