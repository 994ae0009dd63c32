"""Notebook 11: its loops mark all they change, and are one loop; a run that differs is refused."""

import ast
import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import notebooks

SOURCE = notebooks.FOLDER / "11_scale_out.py"
CPU = torch.device("cpu")
TOY = {"width": 16, "heads": 2, "layers": 1, "batch": 8, "lr": 1e-3}


@functools.cache
def tree() -> ast.Module:
    return ast.parse(SOURCE.read_text(encoding="utf-8"))


@functools.cache
def notebook() -> dict:
    """What the notebook's imports, functions and settings define; no other cell is run."""
    settings = {"PRECISIONS", "TOLERANCES", "SETUPS", ("bf16", "fp16", "fp32")}

    def is_kept(node: ast.stmt) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
            return True
        if not isinstance(node, ast.Assign):
            return False
        target = node.targets[0]
        names = [name.id for name in getattr(target, "elts", [target]) if hasattr(name, "id")]
        return (names[0] if len(names) == 1 else tuple(names)) in settings if names else False

    namespace = {}
    kept = [node for node in tree().body if is_kept(node)]
    exec(compile(ast.Module(kept, []), SOURCE, "exec"), namespace)
    return namespace


def lines(name: str) -> list[str]:
    """The lines of a function, without its first one and without indentation."""
    node = next(n for n in tree().body if isinstance(n, ast.FunctionDef) and n.name == name)
    text = SOURCE.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in text[node.lineno : node.end_lineno] if line.strip()]


@pytest.mark.parametrize(("name", "mark"), [("train_ddp", "DDP"), ("train_fsdp", "FSDP2")])
def test_every_changed_line_is_marked_and_nothing_else_changed(name, mark):
    """Without its marked lines, a loop is the plain one without those replaced or moved."""
    before, after = lines("train_plain"), lines(name)
    unmarked = [line for line in after if f"# {mark}" not in line]
    replaced = [
        match[1]
        for line in after
        if (match := re.search(rf"# {mark}: was (?:in )?(.+?)(\(…\))?$", line))
    ] + [line.partition("  #")[0] for line in after if f"# {mark}: was in " in line]
    assert len(after) > len(unmarked)
    for line in before:
        if unmarked and line == unmarked[0]:
            unmarked.pop(0)
        else:
            assert any(old in line for old in replaced), f"{line!r} went, and no comment says so"
    assert unmarked == []


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def toy_data() -> TensorDataset:
    images = torch.randn(32, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(32) % 10)


@pytest.mark.usefixtures("one_rank", "one_thread_and_seed")
def test_on_one_rank_the_loops_are_the_plain_one(toy_data):
    cells = notebook()
    for dtype in (None, torch.bfloat16):
        plain = cells["train_plain"](TOY, toy_data, dtype, CPU)
        assert len(plain) == 4
        assert len(set(plain)) == 4
        assert cells["train_ddp"](TOY, toy_data, dtype, CPU) == plain
        tolerance = 1e-6 if dtype is None else cells["TOLERANCES"]["bf16"]
        off = cells["distance"](cells["train_fsdp"](TOY, toy_data, dtype, CPU), plain)
        assert off < tolerance


@pytest.mark.usefixtures("one_rank", "one_thread_and_seed")
def test_every_set_up_can_be_tried(toy_data):
    cells = notebook()
    sizes = [p.numel() for p in cells["new_model"](TOY).parameters()]
    for engine, compute, reduce in cells["SETUPS"].values():
        found = cells["try_setup"](TOY, *toy_data[:8], engine, compute, reduce)
        assert sum(found["sent"].values()) == 0  # to nobody
        # FSDP2 copies then, DDP asks its backend all the same.
        assert set(found["sent"]) == ({("all_reduce", reduce)} if engine == "DDP" else set())
        assert sum(found["memory"].values()) == 16 * sum(sizes)


@pytest.mark.usefixtures("one_rank", "one_thread_and_seed")
def test_a_checkpoint_is_loaded_into_a_model_that_differs(toy_data, tmp_path):
    cells = notebook()
    share = toy_data[:8]
    saved = cells["save_sharded"](TOY, *share, tmp_path / "checkpoint")
    model, steps = cells["load_sharded"](TOY, *share, tmp_path / "checkpoint")
    assert steps == {3}
    for found, wanted in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(found.to_local(), wanted.to_local())
    fresh = cells["new_model"](TOY)
    assert cells["evaluate"](model, *share) != cells["evaluate"](fresh, *share)


@pytest.mark.parametrize("factor", [1 + 2**-13, float("nan")])
def test_losses_that_differ_are_refused(factor, capsys):
    cells = notebook()
    cells["alone"] = {"fp32": [2.0, 1.0]}
    cells["check_losses"]("these", [{"fp32": [2.0, 1.0]}] * 2)
    assert "these, fp32" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        cells["check_losses"]("these", [{"fp32": [2.0, factor]}] * 2)
    with pytest.raises(AssertionError):
        cells["check_losses"]("these", [{"fp32": [2.0, 1.0]}, {"fp32": [2.0, 1.0 + 1e-7]}])


@pytest.mark.parametrize(
    ("device_type", "gpus", "where", "counts"),
    [
        ("cpu", 0, "cpu", (1, 2, 4)),
        ("cpu", 8, "cpu", (1, 2, 4)),  # asked for with AMP_LAB_DEVICE
        ("cuda", 1, "cpu", (1, 2, 4)),
        ("cuda", 2, "cuda", (1, 2)),
        ("cuda", 3, "cuda", (1, 2)),
        ("cuda", 8, "cuda", (1, 2, 4)),
        ("mps", 1, "cpu", (1, 2, 4)),
    ],
)
def test_processes_run_on_gpus_if_there_is_one_for_each(
    device_type, gpus, where, counts, monkeypatch
):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    names = ("gpus", "where", "counts")
    chosen = [
        node
        for node in tree().body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in names
    ]
    assert [node.targets[0].id for node in chosen] == list(names)
    namespace = {"torch": torch, "device": torch.device(device_type)}
    exec(compile(ast.Module(chosen, []), SOURCE, "exec"), namespace)
    assert (namespace["where"], namespace["counts"]) == (where, counts)
