"""The step by hand in C++: it has the gradients of autograd, or says why it cannot run."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_lab.bench import cpp_tiles, rungs, runner, tiled_convmodel
from amp_lab.bench.convmodel import ConvModel, quantized_sine
from amp_lab.bench.fused_convmodel import FusedStep
from amp_lab.bench.result_row import Row
from amp_lab.bench.tiled_convmodel import TiledStep, tiled_unsupported_reason
from amp_lab.bench.workloads import convmodel_workload
from amp_lab.core.errors import OptionError
from amp_lab.core.precision import Precision

needs_tiles = pytest.mark.skipif(
    bool(tiled_unsupported_reason()), reason=tiled_unsupported_reason() or ""
)
CPU = torch.device("cpu")


def models(hidden: int) -> list[ConvModel]:
    """Three alike, whose normalisation has scales and shifts of its own."""
    torch.manual_seed(0)
    model = ConvModel(hidden)
    for norm in list(model)[1::3]:
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
    return [model, copy.deepcopy(model), copy.deepcopy(model)]


def offs(model, reference) -> list[float]:
    """How far gradients are from a reference's, but for those of biases before a normalisation."""
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    return [
        ((mine.grad - its.grad).norm() / its.grad.norm()).item()
        for (name, mine), its in pairs
        if name not in {"0.bias", "3.bias", "6.bias"}
    ]


# 96 channels: the last columns of a product are no whole panel. 48 x 48: 2,304 pixels, which is no
# whole number of tiles for one thread or two.
@needs_tiles
@pytest.mark.parametrize(("hidden", "size"), [(32, 24), (96, 48), (128, 32)])
def test_tiles_have_the_gradients_of_autograd(hidden, size):
    in_tiles, by_hand, exact = models(hidden)
    inputs, target = quantized_sine(size)
    loss = F.mse_loss(exact(inputs), target)
    loss.backward()
    # Against fp32: each layer rounds to 2^-8, as in the step by hand and in autocast.
    torch.testing.assert_close(TiledStep(in_tiles)(inputs, target), loss, rtol=3e-2, atol=0)
    FusedStep(by_hand, torch.bfloat16, compiled=False)(inputs, target)
    for off, off_by_hand in zip(offs(in_tiles, exact), offs(by_hand, exact), strict=True):
        # It rounds in the same places, but sums before it rounds: another element of 2^8 may go
        # the other way, so that it is about as far off and not exactly.
        assert off < 3e-2
        assert off < 1.5 * off_by_hand + 1e-3
    for (name, mine), its in zip(in_tiles.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine, its, rtol=3e-2, atol=3e-2, msg=name)


@needs_tiles
def test_tiles_are_the_same_in_any_number_of_threads():
    inputs, target = quantized_sine(32)
    losses, threads = [], torch.get_num_threads()
    for model, count in zip(models(64)[:2], (1, 3), strict=True):
        torch.set_num_threads(count)
        try:
            losses.append((TiledStep(model)(inputs, target), model[6].weight.grad))
        finally:
            torch.set_num_threads(threads)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=1e-4)  # sums in other orders


@needs_tiles
def test_the_rung_learns_what_fp32_does():
    workload, checks = convmodel_workload(32, hidden=64), []
    for precision, name in ((Precision.FP32, "eager"), (Precision.BF16, "tiles")):
        ladder = rungs.Ladder(workload, precision, CPU)
        rung = next(rung for rung in rungs.rungs_of(ladder) if rung.name == name)
        step = rungs.make_step(ladder, rung)
        check = torch.stack([step.call().double() for _ in range(runner.CHECKED_STEPS)])
        row = Row("w", "s", str(precision), name, "ok")
        checks.append(runner._Configuration(row, ladder, step, check))
    runner._judge(checks[1], checks[0])
    assert checks[1].row.status == "ok", checks[1].row.reason


@needs_tiles
def test_sizes_that_do_not_fit_are_refused():
    for hidden, size in ((32, 9), (48, 8)):
        with pytest.raises(OptionError, match="and multiples of 32"):
            TiledStep(ConvModel(hidden))(*quantized_sine(size))
    with pytest.raises(OptionError, match=r"bfloat16, not in torch\.float32"):
        TiledStep(ConvModel(32), torch.float32)


def test_without_the_instructions_tiles_say_so(monkeypatch):
    ladder = rungs.Ladder(convmodel_workload(8, hidden=32), Precision.BF16, CPU)
    rung = rungs.rungs_of(ladder)[-1]
    assert rung.name == "tiles"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    with pytest.raises(OptionError, match=r"AVX-512 .*bf16 instructions"):
        rungs.make_step(ladder, rung)  # which a run tells in the row of the rung, as "not run"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(cpp_tiles, "has_bf16_instructions", lambda: False)
    with pytest.raises(OptionError, match=r"oneDNN .*matmuls in bf16"):
        rungs.make_step(ladder, rung)


def test_without_a_compiler_tiles_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(cpp_tiles, "has_bf16_instructions", lambda: True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OptionError, match="compiler no-such-compiler"):
        TiledStep(ConvModel(32))
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'kernel: error: no such instruction' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr(tiled_convmodel, "cpp_kernels", cpp_tiles.cpp_kernels.__wrapped__)
    with pytest.raises(OptionError, match=r"tiled_convmodel\.cpp: kernel: error"):
        TiledStep(ConvModel(32))
