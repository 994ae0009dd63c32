"""Notebook 05: its loops compute what `amp_lab.training` does, and its remedies help."""

import copy

import pytest
import torch
from definitions import definitions
from torch import nn

import build_pairs
from amp_lab import Comparison, Precision
from amp_lab.training.loop import evaluate, fit

SOURCE = build_pairs.FOLDER / "05_cifar10_mobilenet.py"


@pytest.fixture(scope="module")
def notebook() -> dict:
    """What the notebook defines, by name."""
    return definitions(SOURCE, device=torch.device("cpu"))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, groups=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8),
        nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    torch.manual_seed(2)  # for dropout
    return model.to(memory_format=torch.channels_last)


def make_batches(epoch: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(epoch)
    images = torch.randn(12, 3, 6, 6, generator=generator)
    return list(zip(images.split(4), torch.arange(12).remainder(4).split(4), strict=True))


def make_run(precision: Precision) -> dict:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6),
        "scaler": precision.grad_scaler("cpu"),
    }


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
def test_the_loop_trains_bitwise_as_fit_does(notebook, precision):
    ours = make_run(precision)
    found = []
    for epoch in range(2):
        loss = notebook["train_epoch"](loader=make_batches(epoch), dtype=precision.dtype, **ours)
        found.append((loss, notebook["evaluate"](ours["model"], make_batches(9), precision.dtype)))
    theirs = make_run(precision)
    metrics = fit(
        theirs["model"],
        lambda epoch, batch: make_batches(epoch),
        test_batches=lambda: make_batches(9),
        optimizer=theirs["optimizer"],
        scheduler=theirs["scheduler"],
        scaler=theirs["scaler"],
        precision=precision,
        device="cpu",
        epochs=2,
        channels_last=True,
    )
    for mine, other in zip(
        ours["model"].state_dict().values(), theirs["model"].state_dict().values(), strict=True
    ):
        assert torch.equal(mine, other)
    for (loss, accuracy), epoch in zip(found, metrics, strict=True):
        assert loss == pytest.approx(epoch.train_loss, rel=1e-6)  # divided in fp32 or in fp64
        assert accuracy == epoch.test_accuracy
    _, accuracy = evaluate(ours["model"], make_batches(9), precision=precision, device="cpu")
    assert accuracy == found[-1][1]


def test_the_first_two_loops_are_the_third(notebook):
    for dtype, name in ((torch.float32, "train_epoch_fp32"), (torch.bfloat16, "train_epoch_amp")):
        precision = Precision.BF16 if dtype is torch.bfloat16 else Precision.FP32
        first = make_run(precision)
        loss = notebook["train_epoch"](loader=make_batches(), dtype=dtype, **first)
        second = make_run(precision)
        if name == "train_epoch_fp32":
            del second["scaler"]
            assert notebook[name](loader=make_batches(), **second) == loss
        else:
            assert notebook[name](loader=make_batches(), dtype=dtype, **second) == loss
        for mine, other in zip(
            first["model"].parameters(), second["model"].parameters(), strict=True
        ):
            assert torch.equal(mine, other)


def test_flops_and_bytes_are_counted_right(notebook):
    layer = nn.Conv2d(8, 16, 3, groups=4, bias=False)
    images = torch.zeros(2, 8, 10, 10)
    output = layer(images)
    flops, moved = notebook["work"](layer, images.shape, output.shape)
    assert flops == 2 * output.numel() * 2 * 9  # two input channels of 3x3 for each output value
    assert moved == images.nbytes + layer.weight.nbytes + output.nbytes


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Conv2d(8, 16, 1), "pointwise"),
        (nn.Conv2d(3, 8, 3), "first"),
        (nn.Conv2d(8, 8, 3, groups=8), "depthwise"),
        (nn.Conv2d(8, 8, 3, stride=2, groups=8), "depthwise, stride 2"),
    ],
)
def test_kinds_of_convolution(notebook, layer, expected):
    assert notebook["kind"](layer) == expected


def test_an_fp32_island_computes_what_fp32_does(notebook):
    layer = nn.Conv2d(4, 4, 3, groups=4)
    island = copy.deepcopy(layer)
    notebook["keep_in_fp32"](island)
    images = torch.randn(1, 4, 5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(images).dtype is torch.bfloat16
        inside = island(images)
    assert torch.equal(inside, layer(images))


def comparison(fp32_ms, bf16_ms, reason: str = "") -> Comparison:
    samples_s = {"fp32": tuple(ms / 1e3 for ms in fp32_ms), "bf16": (bf16_ms / 1e3,) * len(fp32_ms)}
    return Comparison(samples_s, 0, reason)


@pytest.mark.parametrize(
    ("fp32_ms", "reason", "expected"),
    [
        ([20] * 12, "", "faster than fp32"),
        ([5] * 12, "", "slower than fp32"),
        ([9, 11] * 6, "", "as fast as fp32, or too close to tell"),
        ([20] * 12, "the machine was busy in 9 of 12 rounds", "too busy to tell"),
    ],
)
def test_the_verdict_follows_from_the_interval(notebook, fp32_ms, reason, expected):
    speedup = comparison(fp32_ms, 10, reason).ratio("fp32", "bf16")
    assert notebook["verdict"](speedup) == expected


def test_multiples_of_8_are_held_against_other_sizes_by_rate(notebook):
    """Sizes of 1 FLOP a unit: multiples take a second for each, the others two; a slow round."""
    notebook["middle_sizes"] = {"matrix n x n": 64}
    sizes = notebook["sizes"]("matrix n x n")
    assert [n for n in sizes if n % 8 == 0] == [56, 64, 72]
    flops = {f"fp32 {n}": n for n in sizes}
    turns = [1.0] * 11 + [5.0]  # what slows a whole round leaves its ratio as it is
    samples_s = {
        f"fp32 {n}": tuple(turn * n * (2 if n % 8 else 1) for turn in turns) for n in sizes
    }
    notebook["found"] = {"matrix n x n": (Comparison(samples_s, 0, ""), flops)}
    ratio = notebook["multiples_over_others"]("matrix n x n", "fp32")
    assert ratio.median == pytest.approx(2)
    assert ratio.interval == pytest.approx((1.96, 2.04))
