"""The largest batch that fits, held against forecasts of it and of the next."""

import re

import pytest
import torch
from memory_models import Two, vgg
from torch import nn

from amp_lab import forecast_memory, largest_batch
from amp_lab.core.errors import TraceError
from amp_lab.tracing import compare_memory, parse_bytes

MIB = 2**20


@pytest.mark.parametrize(("precision", "shape"), [("fp32", (1, 3, 64, 64)), ("fp16", (3, 64, 64))])
def test_the_largest_batch_fits_and_the_next_does_not(precision, shape):
    model, limit = vgg(), 200 * MIB
    batch = largest_batch(model, shape, memory_bytes=limit, precision=precision)
    peaks = [
        forecast_memory(model, torch.empty(b, 3, 64, 64, device="meta"), precision=precision).peak
        for b in (batch, batch + 1)
    ]
    assert batch > 10
    assert peaks[0] <= limit < peaks[1]


def test_largest_batch_of_tokens_with_a_loss():
    def loss_fn(logits):  # (B, T, V)
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.zeros(logits.shape[:2], dtype=torch.int64).flatten()
        )

    def largest(loss_fn):
        return largest_batch(
            nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 500)),
            (1, 32),
            memory_bytes="64 MiB",
            precision="bf16",
            loss_fn=loss_fn,
            input_dtype=torch.int64,
        )

    assert 0 < largest(loss_fn) < largest(None)  # the loss keeps the probabilities


def test_a_model_that_does_not_fit_has_a_largest_batch_of_zero():
    model = vgg()
    assert largest_batch(model, (1, 3, 64, 64), memory_bytes="1 MB", precision="fp32") == 0
    table = compare_memory(model, (1, 3, 64, 64), memory_bytes="1 MB", precisions=["fp32"])
    assert table.largest == {"fp32": 0}


def test_a_memory_that_is_not_affine_in_the_batch_is_refused():
    class Pairs(nn.Linear):
        def forward(self, x):  # (B, 4): every item with every other
            y = super().forward(x)
            return (y @ y.t()).exp()

    with pytest.raises(TraceError, match=r"Pairs: .* not grow linearly with the batch"):
        largest_batch(Pairs(4, 4), (1, 4), memory_bytes="1 GiB", precision="fp32")
    table = compare_memory(Pairs(4, 4), (64, 4), memory_bytes="1 GiB", precisions=["fp32"])
    one = forecast_memory(Pairs(4, 4), torch.empty(64, 4), precision="fp32")
    assert table["fp32"].peak == one.peak
    assert table.largest == {}
    assert "not grow linearly with the batch" in table.no_largest["fp32"]


def test_what_a_model_raises_at_another_batch_is_named_with_it():
    class KnowsItsBatch(nn.Linear):
        def forward(self, x):
            return {2: 1.0}[len(x)] * super().forward(x)

    table = compare_memory(KnowsItsBatch(4, 4), (2, 4), memory_bytes="1 GiB", precisions=["fp32"])
    assert re.match(r"KnowsItsBatch: KeyError: 3 .*batch of 3", table.no_largest["fp32"])


def test_largest_batch_of_several_inputs():
    options = {"memory_bytes": "16 MiB", "input_dtype": (torch.int64, torch.float32)}
    batches = {
        largest_batch(Two(), shapes, precision="fp32", **options)
        for shapes in ([(1, 8), (1, 8, 64)], [(8,), (8, 64)])
    }
    table = compare_memory(Two(), [(4, 8), (4, 8, 64)], precisions=["fp32"], **options)
    assert batches == {table.largest["fp32"]}
    (batch,) = batches
    assert batch > 100
    peaks = [
        forecast_memory(
            Two(), torch.empty(b, 8, dtype=torch.int64), torch.empty(b, 8, 64), precision="fp32"
        ).peak
        for b in (4, batch, batch + 1)
    ]
    assert table["fp32"].peak == peaks[0]
    assert table["fp32"].input_shapes == ((4, 8), (4, 8, 64))
    assert peaks[1] <= 16 * MIB < peaks[2]


def test_inputs_that_do_not_go_together_are_refused():
    shapes = [(4, 8), (3, 8, 64)]
    with pytest.raises(TraceError, match=r"\(4, 8\), \(3, 8, 64\), but the first size is"):
        compare_memory(Two(), shapes)
    with pytest.raises(TraceError, match=r"^1 input dtypes for 2 inputs"):
        compare_memory(Two(), shapes, input_dtype=[torch.int64])
    for wrong in ([(4, 8), ()], [(4, 8), (0, 8)], [(4, 8), 3]):
        with pytest.raises(TraceError, match=r"^input shape .*1 or more"):
            compare_memory(Two(), wrong)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("24 GB", 24 * 10**9),
        (" 1.5 mib ", 3 * 2**19),
        ("2097152", 2**21),
        ("7B", 7),
        ("1TB", 10**12),
        (2**40, 2**40),
    ],
)
def test_parse_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["-24GiB", "24G", "GiB", "", "nan", "1e9", "24 GiB of it", "0", "0.1B", -1, True, 1.5]
)
def test_parse_bytes_refuses(text):
    with pytest.raises(TraceError, match=r"^memory .*: give ") as error:
        parse_bytes(text)
    assert "\n" not in str(error.value)
