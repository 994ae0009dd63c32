"""Notebook 09: its tracer sees what `xray` reports, and what a real run does."""

import pytest
import torch
from cpu_kernels import needs_lstm
from definitions import definitions
from torch import nn

import build_pairs
from amp_lab import xray

SOURCE = build_pairs.FOLDER / "09_xray_your_model.py"
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
BACKENDS = ("cuda", "xpu", "mps", "cpu")
SHAPE = (2, 3, 12, 12)


@pytest.fixture(scope="module")
def notebook() -> dict:
    """What the notebook defines, by name."""
    return definitions(SOURCE, ["SHORT"], device=torch.device("cpu"))


def comparable(rows: list) -> list:
    """The tracer's rows without casts and views, and with the names that `xray` gives to norms."""
    passed_over = {"_to_copy", "view", "t"}
    return [(op.removeprefix("native_"), *rest) for op, *rest in rows if op not in passed_over]


def other_net() -> nn.Module:
    """Layers that are not in the notebook's own network."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Conv2d(8, 4, 1),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(100, 6),
        nn.Tanh(),
        nn.LogSoftmax(-1),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tracer_and_xray_see_the_same_rows(notebook, backend):
    rows = notebook["trace_on"](backend, other_net(), SHAPE)
    found = xray(other_net(), torch.empty(SHAPE), device_type=backend)
    theirs = [
        (row.op, *(tuple(SHORT[d] for d in dtypes) for dtypes in (row.in_dtypes, row.out_dtypes)))
        for row in found.rows
    ]
    assert len(theirs) == 8
    assert comparable(rows) == theirs
    assert [op for op, *_ in rows].count("_to_copy") == len(found.casts)


def test_fake_rows_are_those_of_a_real_run(notebook):
    net = other_net()
    with torch.no_grad(), torch.autocast("cpu"), notebook["Tracer"]() as tracer:
        net(torch.ones(SHAPE))
    real = [row for row in tracer.rows if row[0] != "ones"]
    assert notebook["trace_on"]("cpu", net, SHAPE) == real


def test_products_inside_an_lstm_are_in_the_dtype_that_xray_says(notebook):
    """It is one op in the X-ray, and each kind of CPU may run other kernels for it."""
    needs_lstm(torch.bfloat16, with_gradients=False)
    classifier, sequence = notebook["Classifier"](), torch.rand(8, 32, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), notebook["Tracer"]() as tracer:
        classifier(sequence)
    products = [row for row in tracer.rows if row[0] in ("mm", "addmm", "mkldnn_rnn_layer")]
    assert len(products) >= 3  # two layers and the head
    assert {dtype for _, before, _ in products for dtype in before} == {"bf16"}
    rows = xray(classifier, sequence, device_type="cpu").rows
    assert {row.dtype for row in rows if row.flops} == {torch.bfloat16}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_is_what_it_was_after_an_error(notebook, backend):
    before = torch.is_autocast_enabled(backend), torch.get_autocast_dtype(backend)
    rules = notebook["rules_of"](backend, torch.bfloat16)
    with pytest.raises(ZeroDivisionError), rules:
        _ = 1 / (not torch.is_autocast_enabled(backend))  # it is enabled: this raises
    assert (torch.is_autocast_enabled(backend), torch.get_autocast_dtype(backend)) == before
    assert type(torch.ones(1)) is torch.Tensor


def test_cross_entropy_rounds_on_cuda_unless_given_floats(notebook):
    dtype_of = notebook["log_softmax_dtype"]
    assert dtype_of("cuda", notebook["plain"]) == ("fp16", "fp32")
    assert dtype_of("cuda", notebook["on_floats"]) == ("fp32", "fp32")


def test_the_two_ops_of_cross_entropy_called_one_by_one_are_in_fp32_on_cuda(notebook):
    def two_ops(logits, target):
        return torch.nn.functional.nll_loss(logits.log_softmax(-1), target)

    assert notebook["log_softmax_dtype"]("cuda", two_ops) == ("fp32", "fp32")


def test_a_sum_on_cuda_takes_fp16_and_returns_fp32(notebook):
    with notebook["rules_of"]("cuda"):
        values = torch.empty(4, dtype=torch.float16, device="cuda")
        with notebook["Tracer"]() as tracer:
            values.sum()
    assert tracer.rows == [("sum", ("fp16",), ("fp32",))]
