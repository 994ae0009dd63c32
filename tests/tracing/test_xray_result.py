"""xray_result: the table, Markdown, HTML and JSON of an X-ray, and of two side by side."""

import json
import re
import weakref

import pytest
import torch
import torchvision
from small_models import Head
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.tracing import compare_xrays, xray_result
from amp_lab.tracing.xray import xray

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

BF16, FP32 = torch.bfloat16, torch.float32


def test_the_table_of_a_deep_model_is_short_and_adds_up():
    found = xray(torchvision.models.resnet50(), torch.empty(8, 3, 224, 224))
    lines = str(found).splitlines()
    assert re.match(r"ResNet on cuda, autocast fp16 .*fake", lines[0])
    table = lines[4 : lines.index("", 4)]
    assert 5 < len(table) <= 28
    assert any(line.startswith("layer3.1 … 5") for line in table)
    cells = found._table().rows
    assert sum(int(line[2].replace(",", "")) for line in cells) == len(found.rows)
    assert sum(int(line[6]) for line in cells if line[6] != "-") == len(found.casts)
    assert "100.0 % of the work" in str(found)
    assert sum(row.flops for row in found.rows) == pytest.approx(8 * 2 * 4.09e9, rel=0.01)
    assert "Output: fp16 (8, 1000)." in str(found)
    assert all(len(line) <= 200 for line in table)


def test_a_new_column_of_the_table_needs_a_row_alone(monkeypatch):
    new = xray_result._Column(
        "fp32 casts", lambda line, total: f"{len(line.casts)}!", is_right=True
    )
    monkeypatch.setattr(xray_result, "_COLUMNS", (*xray_result._COLUMNS, new))
    table = xray(Head(), torch.randn(8, 8))._table()
    assert table.head[-2:] == ["output", "fp32 casts"]
    assert table.right == [2, 3, 6, 8]
    assert all(cells[-1].endswith("!") for cells in table.rows)


def test_markdown_html_and_json_say_the_same():
    found = xray(Head(), torch.randn(8, 8), loss_fn=torch.sum)
    assert "| norm | LayerNorm | 1 |" in found.to_markdown()
    assert "<td>LayerNorm</td>" in found._repr_html_()
    read = json.loads(found.to_json())
    assert read["dtype"] == "float16"
    assert [row["op"] for row in read["rows"]] == [row.op for row in found.rows]
    assert read["rows"][0]["in_dtypes"] == ["float16"] * 3
    assert len(read["casts"]) == len(found.casts)
    assert read["advice"] == found.advice
    assert read["outputs"] == {"": {"dtype": "float32", "shape": [8, 8]}}
    assert repr(found) == str(found)
    for sentence in found.advice:
        assert sentence in str(found)
        assert sentence in found.to_markdown()


def test_fp32_leaves_autocast_off():
    found = xray(Head(), torch.randn(8, 8), dtype=FP32)
    assert {row.out_dtypes[0] for row in found.rows} == {FP32}
    assert not found.casts
    assert not found.advice
    assert "autocast off" in str(found)


def casts_kept(model, x, under):
    """Bytes of casts of weights that autocast's cache keeps to the end of a real pass."""
    made = weakref.WeakSet()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and out.shape in shapes:
                made.add(out)
            return out

    shapes = {parameter.shape for parameter in model.parameters()}
    with under(), torch.autocast("cpu", BF16), Watch():
        model(x)
        return sum(cast.nbytes for cast in made)


def test_in_evaluation_mode_it_is_said_what_the_cache_keeps():
    model, x = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 40)), torch.rand(3, 64)
    said = "Under inference_mode, autocast has no cache"
    assert said not in str(xray(model, x, device_type="cpu"))
    found = xray(model.eval(), x, device_type="cpu")
    assert said in str(found)
    kept = sum(cast.nbytes for cast in found.casts if cast.cached)
    assert f"the cache keeps {kept / 2**10:.1f} KiB" in str(found)
    assert casts_kept(model, x, torch.no_grad) == kept > 0
    assert casts_kept(model, x, torch.inference_mode) == 0
    frozen = xray(model.requires_grad_(False), x, device_type="cpu")
    assert said not in str(frozen)
    assert casts_kept(model, x, torch.no_grad) == 0


@pytest.mark.parametrize("under", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_casts_that_are_kept_are_those_of_the_mode_that_the_trace_runs_in(under):
    model, x = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 40)), torch.rand(3, 64)
    with under():
        found = xray(model, x, device_type="cpu")
    kept = sum(cast.nbytes for cast in found.casts if cast.cached)
    assert casts_kept(model, x, under) == kept


def test_backends_differ_and_compare_shows_where():
    cuda, cpu = (
        xray(Head(), torch.randn(8, 8), device_type=d, dtype=BF16) for d in ("cuda", "cpu")
    )
    both = compare_xrays(cuda, cpu)
    assert [(a.called, a.out_dtypes[0], b.out_dtypes[0]) for a, b in both.different] == [
        ("layer_norm", FP32, BF16),
        ("softmax", FP32, BF16),
    ]
    for text in (str(both), both.to_markdown(), both._repr_html_()):
        assert "cuda bf16" in text
        assert "layer_norm" in text
    assert len(json.loads(both.to_json())["different"]) == 2
    assert not compare_xrays(cuda, cuda).different
    assert "0 of 4 ops differ" in str(compare_xrays(cuda, cuda))
    without = compare_xrays(cuda, xray(Head().a, torch.randn(8, 8)))
    assert (None in [b for _, b in without.different]) is True
