"""Xray.by_module: outputs held against forward hooks, parameters against what torch counts."""

import contextlib
import json
import re
from collections import Counter, defaultdict

import pytest
import torch
import torch.nn.functional as F
import torchvision
from small_models import CellRnn, Cnn, Head, Rnn, Transformer, hooks_of, images, series, tokens
from torch import nn

from amp_lab.core.errors import OptionError
from amp_lab.core.tensors import named_tensors
from amp_lab.tracing.xray import xray

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def rows_of(found, depth=None):
    return {row.name: row for row in found.by_module(depth).rows}


class Structured(nn.Module):
    """Parts that return a tuple, a dict and no tensor, one called twice, one never, and a list."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.pair, self.named, self.count = Pair(), Named(), Count()
        self.twice, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)
        self.again = self.twice

    def forward(self, ids):
        x = self.embed(ids)
        left, _ = self.pair(x)
        x = self.named(left)["y"] * self.count(x)
        x = self.again(self.twice(x)[:, :2])
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x), "hidden": (x, [left])}


class Pair(nn.Module):
    def forward(self, x):
        return x.half(), [x, {"n": 3}]


class Named(nn.Module):
    def forward(self, x):
        return {"y": x.float(), "none": None}


class Count(nn.Module):
    def forward(self, x):
        return len(x)


MODELS = {
    "cnn": (Cnn, images),
    "head": (Head, lambda: torch.randn(8, 8)),
    "transformer": (Transformer, tokens),
    "rnn": (lambda: Rnn(nn.GRU), series),
    "cell": (CellRnn, series),
    "structured": (Structured, tokens),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: torch.randn(2, 3, 8),
    ),
    "resnet": (torchvision.models.resnet18, lambda: torch.randn(2, 3, 32, 32)),
}


@contextlib.contextmanager
def hooked(model):
    """Counts of the calls of each module, and the shapes and dtypes that they return."""
    counts, outputs = Counter(), defaultdict(list)
    handles = []
    for name, module in model.named_modules():

        def hook(module, args, output, name=name):
            counts[name] += 1
            outputs[name].append([(t.dtype, tuple(t.shape)) for _, t in named_tensors(output)])

        handles.append(module.register_forward_hook(hook))
    yield counts, outputs
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("family", MODELS)
def test_outputs_are_those_that_hooks_see(family, dtype, real):
    build, inputs = MODELS[family]
    model, inputs = build(), inputs()
    found = xray(model, inputs, device_type="cpu", dtype=dtype, real=real)
    assert hooks_of(model) == 0
    with hooked(model) as (counts, outputs), torch.autocast("cpu", BF16, enabled=dtype is BF16):
        model(inputs)
    rows = rows_of(found)
    assert list(rows) == [name for name, _ in model.named_modules()]
    for name, row in rows.items():
        assert row.calls == counts[name]
        different = [list(of_call.values()) for of_call in row.outputs]
        assert all(seen in different for seen in outputs[name])
        assert all(seen in outputs[name] for seen in different)


@pytest.mark.parametrize("family", MODELS)
def test_parameters_are_those_that_torch_counts(family):
    build, inputs = MODELS[family]
    model, inputs = build(), inputs()
    found = xray(model, inputs)
    rows = rows_of(found)
    for name, module in model.named_modules():
        inside = list(module.parameters())
        assert rows[name].parameters == sum(p.numel() for p in inside)
        assert rows[name].frozen == sum(p.numel() for p in inside if not p.requires_grad)
        assert rows[name].nbytes == sum(p.numel() * p.element_size() for p in inside)
        own = module.parameters(recurse=False)
        assert rows[name].own_parameters == sum(p.numel() for p in own)
    table = found.by_module(1)
    assert table.parameters == sum(p.numel() for p in model.parameters())
    assert table.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_each_part_that_is_not_plain_has_a_sensible_row():
    found = xray(Structured(), tokens(), dtype=FP16)
    rows = rows_of(found)
    cells = {name: row.cells() for name, row in rows.items()}
    assert cells[""][:2] == ["the model", "Structured"]
    assert cells[""][2] == "logits (2, 2, 7), hidden.0 (2, 2, 8), hidden.1.0 (2, 4, 8)"
    assert cells["pair"][2:4] == ["0 (2, 4, 8), 1.0 (2, 4, 8)", "fp16, fp32"]
    assert cells["named"][2:4] == ["y (2, 4, 8)", "fp32"]
    assert cells["count"][2:4] == ["no tensor", "-"]
    assert cells["never"][2:4] == ["-", "-"]
    assert rows["never"].notes == ["forward not called"]
    assert cells["layers"][2:] == ["-", "-", "144", "0", "72 frozen"]  # never called, as ever
    assert rows["layers.0"].notes == []
    assert rows["layers.1"].notes == ["frozen"]
    assert cells["twice"][2] == "(2, 4, 8) or (2, 2, 8)"
    assert rows["twice"].notes == ["called 2 times", "is again too"]
    assert "again" not in rows
    assert rows["head"].notes == ["weight is embed.weight"]
    assert rows["head"].parameters == 56
    table = found.by_module()
    assert table.parameters == 56 + 4 * 72  # the head's weight is the embedding's
    size = "344 parameters (1.3 KiB): 272 trainable, 72 frozen. Tied weights count once."
    assert size in str(table)


def test_a_model_without_parts_is_one_row():
    table = xray(nn.Linear(8, 16), torch.randn(4, 8)).by_module(3)
    (row,) = table.rows
    assert row.cells() == ["the model", "Linear", "(4, 16)", "fp16", "144", "144", ""]
    lines = str(table).splitlines()
    assert re.match(r"Linear on cuda, autocast fp16 .*fake", lines[0])
    assert lines[-4].split() == ["total", "144"]
    assert lines[-2].startswith("144 parameters (0.6 KiB): 144 trainable, 0 frozen.")
    assert re.match(r"Matmuls.*: 1,024 FLOP\.", lines[-1])


def test_a_model_without_parameters_and_tensors_of_no_dimension():
    class Sum(nn.Module):
        def forward(self, x):
            return x.sum()

    (row,) = xray(Sum(), torch.randn(4)).by_module().rows
    assert row.cells() == ["the model", "Sum", "()", "fp32", "0", "0", ""]


def test_the_depth_says_how_far_down_the_rows_go():
    found = xray(torchvision.models.resnet18(), torch.randn(2, 3, 32, 32))
    counts = [len(found.by_module(depth).rows) for depth in (1, 2, 3, 4, 99, None)]
    assert counts == [11, 19, 62, 68, 68, 68]
    for depth in (1, 2, 3):
        for row in found.by_module(depth).rows:
            assert len(row.name.split(".")) <= depth
    for wrong in (0, -1, "2", 1.5):
        with pytest.raises(OptionError, match=rf"^depth {wrong!r}: .*at least 1"):
            found.by_module(wrong)


def test_markdown_html_and_json_of_the_modules_say_the_same():
    model = Structured()
    found = xray(model, tokens()).by_module(1)
    assert "| head | Linear | (2, 2, 7) | fp16 | 56 | 56 | weight is embed.weight |" in (
        found.to_markdown()
    )
    assert "**344**" in found.to_markdown()
    assert "<td>weight is embed.weight</td>" in found._repr_html_()
    read = json.loads(found.to_json())
    assert [row["name"] for row in read["rows"]] == ["", *(n for n, _ in model.named_children())]
    by_name = {row["name"]: row for row in read["rows"]}
    assert by_name["pair"]["outputs"] == [
        {
            "0": {"dtype": "float16", "shape": [2, 4, 8]},
            "1.0": {"dtype": "float32", "shape": [2, 4, 8]},
        }
    ]
    assert by_name["head"]["tied"] == {"weight": "embed.weight"}
    total = {"parameters": 344, "trainable": 272, "frozen": 72, "nbytes": 4 * 344}
    assert read["total"].items() > total.items()


def test_what_ran_before_an_error_is_shown_and_that_there_was_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    found = xray(
        model,
        torch.randn(8, 8),
        loss_fn=lambda p: F.binary_cross_entropy(p, torch.zeros(8, 8)),
    )
    assert rows_of(found)["1"].outputs == ({"": (FP16, (8, 8))},)
    assert f"The model fails only under autocast: {found.raised}" in str(found.by_module())


def test_a_part_that_raises_has_no_output():
    class Fails(nn.Linear):
        def forward(self, x):
            return F.binary_cross_entropy(super().forward(x).sigmoid(), torch.zeros_like(x))

    model = nn.Sequential(nn.Linear(8, 8), Fails(8, 8), nn.ReLU())
    rows = rows_of(xray(model, torch.randn(8, 8)))
    assert [rows[name].calls for name in ("", "0", "1", "2")] == [1, 1, 1, 0]
    assert [rows[name].outputs for name in ("", "1", "2")] == [(), (), ()]


def test_a_model_on_meta_is_counted_too():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**15, 2**17), nn.Linear(2**17, 2**15))
    table = xray(model, torch.empty(8, 2**15, device="meta")).by_module(1)
    assert table.parameters == 2 * 2**32 + 2**17 + 2**15
