"""The step written by hand: it has the loss and gradients of autograd."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_lab.bench import fused_convmodel
from amp_lab.bench.convmodel import ConvModel, quantized_sine
from amp_lab.bench.fused_convmodel import BLOCK, FusedStep

SIZE = 70  # 4,900 pixels: a block and a part of one


def autograd_step(model, inputs, target, dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = F.mse_loss(model(inputs), target)
    loss.backward()
    return loss.detach()


# --- The step written by hand.


@pytest.mark.parametrize(
    # fp32: another order of summation. bf16: both round each layer to 2^-8, in their own places.
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)],
)
def test_step_by_hand_has_the_gradients_of_autograd(dtype, tolerance):
    assert BLOCK < SIZE**2 < 2 * BLOCK
    torch.manual_seed(0)
    model = ConvModel(32)
    for norm in list(model)[1::3]:  # else scale and shift would be 1 and 0
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
    reference = copy.deepcopy(model)
    inputs, target = quantized_sine(SIZE)
    loss = FusedStep(model, dtype, compiled=False)(inputs, target)
    torch.testing.assert_close(
        loss, autograd_step(reference, inputs, target, dtype), rtol=tolerance, atol=0
    )
    before_norm = {f"{i}.bias" for i in (0, 3, 6)}
    for (name, mine), its in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name in before_norm:  # zero, but for the rounding of autograd
            assert not mine.grad.any()
            assert its.grad.norm() < 1e-2 * reference[9].weight.grad.norm()
            continue
        off = (mine.grad - its.grad).norm() / its.grad.norm()
        assert off < tolerance, name
    for (name, mine), its in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance, msg=name)


def test_step_by_hand_trains_like_autograd():
    torch.manual_seed(0)
    model = ConvModel(16)
    reference = copy.deepcopy(model)
    inputs, target = quantized_sine(16)
    step = FusedStep(model, torch.float32, compiled=False)
    mine, its = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, reference))
    losses = []
    for _ in range(5):
        its.zero_grad()
        losses.append((step(inputs, target), autograd_step(reference, inputs, target, None)))
        mine.step()
        its.step()
    first, last = losses[0], losses[-1]
    assert last[0] < 0.9 * first[0]
    torch.testing.assert_close(*last, rtol=1e-4, atol=0)


def test_compiled_step_by_hand_computes_the_same(monkeypatch):
    # Captured whole and made functional, but no C++ is built of it, which takes a second or more
    # for each kernel whatever its shapes. Notebook 10 holds the built kernels to fp32's losses.
    compile_ = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", compile_)
    fused_convmodel._chains.cache_clear()
    torch.manual_seed(0)
    model = ConvModel(8)
    inputs, target = quantized_sine(16)
    losses, gradients = [], []
    for compiled in (False, True):
        own = copy.deepcopy(model)
        losses.append(FusedStep(own, torch.bfloat16, compiled=compiled)(inputs, target))
        gradients.append([p.grad for p in own.parameters()])
    fused_convmodel._chains.cache_clear()  # others get kernels of their own
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    for plain, compiled in zip(*gradients, strict=True):  # an element may round to the next bf16
        torch.testing.assert_close(plain, compiled, rtol=2e-2, atol=1e-4)
