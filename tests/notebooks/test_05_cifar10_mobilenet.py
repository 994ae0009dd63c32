"""Notebook 05: its loops compute what `amp_lab.train` does, and its remedies help."""

import os
import statistics
import subprocess
import sys

import pytest
import torch
from definitions import definitions
from torch import nn
from torch.utils.data import DataLoader

from course import layer_times

import build_pairs
from amp_lab import Precision
from amp_lab.train.loop import evaluate, fit

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


def plain_epoch(model, optimizer, scheduler) -> float:
    """The loop without the lines of AMP; returns the mean loss."""
    model.train()
    loss_sum, samples = torch.zeros(()), 0
    for images, targets in make_batches():
        outputs = model(images.to(memory_format=torch.channels_last))
        loss = nn.functional.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        loss_sum += loss.detach() * len(targets)
        samples += len(targets)
    return loss_sum.item() / samples


def test_in_fp32_the_loop_is_the_plain_one(notebook):
    first = make_run(Precision.FP32)
    loss = notebook["train_epoch"](loader=make_batches(), dtype=torch.float32, **first)
    second = make_run(Precision.FP32)
    del second["scaler"]
    assert plain_epoch(**second) == loss
    for mine, other in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        assert torch.equal(mine, other)


def test_depthwise_layers_do_little_arithmetic_for_each_byte():
    """Less than 2.5 FLOPs a byte in fp32, where a pointwise one does more, at both sizes."""
    for size in (32, 224):
        intensity = {"depthwise": [], "pointwise": []}
        for layer, shape in layer_times.convolutions(8, size):
            output = layer(torch.empty(shape, device="meta"))
            flops = 2 * output.numel() * layer.weight[0].numel()
            moved = 4 * (shape.numel() + layer.weight.numel() + output.numel())
            kind = layer_times.kind(layer).partition(",")[0]
            intensity.setdefault(kind, []).append(flops / moved)
        assert statistics.median(intensity["depthwise"]) < 2.5
        assert statistics.median(intensity["pointwise"]) > 2.5


def test_four_of_52_convolutions_are_depthwise_with_stride_2():
    kinds = [layer_times.kind(layer) for layer, _ in layer_times.convolutions(1, 64)]
    assert len(kinds) == 52
    assert kinds.count("depthwise, stride 2") == 4
    assert set(kinds) == set(layer_times.KINDS)


DEPTHWISE_WITH_STRIDE_2 = """
import torch

layer = torch.nn.Conv2d(96, 96, 3, stride=2, padding=1, groups=96, bias=False)
layer.to(memory_format=torch.channels_last)
for dtype in (torch.float32, torch.bfloat16):
    images = torch.randn(8, 96, 16, 16).to(dtype, memory_format=torch.channels_last)
    images.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        output = layer(images)
    output.backward(output.detach())
"""


@pytest.mark.skipif(
    not torch.__version__.startswith("2.15") or not torch.cpu._is_avx512_bf16_supported(),
    reason="the notebook speaks of torch 2.15 on a CPU with AVX-512 BF16",
)
@pytest.mark.parametrize("limit", ["avx512_core_bf16", "avx512_core_amx"])  # AMX if it is there
def test_in_bf16_a_general_kernel_computes_the_input_gradients_of_stride_2(limit):
    done = subprocess.run(
        [sys.executable, "-c", DEPTHWISE_WITH_STRIDE_2],
        env=os.environ | {"ONEDNN_VERBOSE": "1", "ONEDNN_MAX_CPU_ISA": limit},
        capture_output=True,
        text=True,
        check=True,
    )
    kernels = []
    for line in done.stdout.splitlines():
        fields = line.split(",")
        if "convolution" in fields and "backward_data" in fields:
            kernels.append(fields[fields.index("backward_data") - 1].partition(":")[0])
    assert kernels == ["jit_dw", "brgconv_strided"]


def test_on_32x32_pixels_the_last_convolution_sees_a_single_pixel():
    sizes = {size: layer_times.convolutions(2, size)[-1][1][2:] for size in (32, 64)}
    assert sizes == {32: (1, 1), 64: (2, 2)}


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Conv2d(8, 16, 1), "pointwise"),
        (nn.Conv2d(3, 8, 3), "first"),
        (nn.Conv2d(8, 8, 3, groups=8), "depthwise"),
        (nn.Conv2d(8, 8, 3, stride=2, groups=8), "depthwise, stride 2"),
    ],
)
def test_kinds_of_convolution(layer, expected):
    assert layer_times.kind(layer) == expected


def test_a_loader_that_shuffles_draws_from_the_random_state():
    before = torch.get_rng_state()
    list(DataLoader(range(4), shuffle=True))
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_pointwise_convolution_is_a_matmul_over_the_channels():
    layer = nn.Conv2d(3, 5, 1, bias=False, dtype=torch.float64)
    images = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    product = torch.einsum("oc,bchw->bohw", layer.weight[:, :, 0, 0], images)
    torch.testing.assert_close(layer(images), product)
