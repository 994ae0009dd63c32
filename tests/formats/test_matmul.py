"""A matmul with rounded operands: forward, dgrad and wgrad, each in its own format."""

import pytest
import torch

from amp_lab.core.errors import NumericsError
from amp_lab.formats import MatmulFormats, hadamard, quantize, quantized_linear


def operands(dtype=torch.float32):
    draws = torch.Generator().manual_seed(0)
    values = torch.randn(4, 8, 64, generator=draws).to(dtype).requires_grad_()
    weight = torch.randn(96, 64, generator=draws).to(dtype).requires_grad_()
    return values, weight, torch.randn(4, 8, 96, generator=draws)


def test_each_of_the_three_matmuls_rounds_along_what_it_sums_over():
    values, weight, grad = operands()
    found = quantized_linear(values, weight, MatmulFormats("nvfp4", "mxfp8", "fp8-rowwise"))
    found.backward(grad)
    rows, grads = values.detach().flatten(0, 1), grad.flatten(0, 1)
    w = weight.detach()
    forward = quantize(rows, "nvfp4") @ quantize(w, "nvfp4").T
    to_input = quantize(grads, "mxfp8") @ quantize(w.T, "nvfp4").T
    to_weight = quantize(grads.T, "fp8-rowwise") @ quantize(rows.T, "fp8-rowwise").T
    torch.testing.assert_close(found.detach().flatten(0, 1), forward)
    torch.testing.assert_close(values.grad.flatten(0, 1), to_input)
    torch.testing.assert_close(weight.grad, to_weight)


def test_gradients_have_the_dtype_of_what_they_belong_to_also_under_autocast():
    values, weight, grad = operands(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = quantized_linear(values, weight, "mxfp8")
    found.backward(grad)
    assert found.dtype is torch.float32  # its sums are, as those of the hardware
    assert (values.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    exact = quantize(values, "mxfp8").flatten(0, 1) @ quantize(weight, "mxfp8").T
    torch.testing.assert_close(found.flatten(0, 1), exact)


def test_what_needs_no_gradient_gets_none():
    values, weight, grad = operands()
    quantized_linear(values.detach(), weight, "fp8").backward(grad)
    assert values.grad is None
    assert weight.grad is not None


def test_a_size_of_no_multiple_is_told():
    with pytest.raises(NumericsError, match="3x40 values, is not a multiple of the 1x32 blocks"):
        quantized_linear(torch.ones(3, 40), torch.ones(2, 40), "mxfp4")


def test_a_batch_of_no_multiple_is_filled_with_zeros_for_the_gradient_of_the_weight():
    values, weight, grad = operands()
    rows, grads = values.detach().flatten(0, 1)[:20], grad.flatten(0, 1)[:20]
    quantized_linear(rows, weight, "mxfp8").backward(grads)
    filled = [torch.nn.functional.pad(x.T, (0, 12)) for x in (grads, rows)]
    expected = quantize(filled[0], "mxfp8") @ quantize(filled[1], "mxfp8").T
    torch.testing.assert_close(weight.grad, expected)


def test_a_hadamard_transform_keeps_matmuls_and_spreads_an_outlier():
    left, right = torch.randn(8, 64), torch.randn(4, 64)
    torch.testing.assert_close(hadamard(left) @ hadamard(right).T, left @ right.T)
    torch.testing.assert_close(hadamard(left).norm(), left.norm())
    alone = torch.zeros(1, 16)
    alone[0, 5] = 8.0
    assert hadamard(alone).abs().tolist() == [[2.0] * 16]
    assert not torch.equal(hadamard(left), hadamard(left, seed=1))
    for size in (0, 3, 128):
        with pytest.raises(NumericsError, match=f"size {size} .*power of two .* 64"):
            hadamard(left, size)


def test_hadamard_and_stochastic_rounding_help_the_gradient_of_the_weight():
    draws = torch.Generator().manual_seed(0)
    values, grad = torch.randn(256, 32, generator=draws), torch.randn(256, 64, generator=draws)
    grad[3::32] *= 10.0  # an outlier in each block of what is summed over
    weight = torch.zeros(64, 32, requires_grad=True)
    exact, off = grad.T @ values, {}
    for mixed in (False, True):
        weight.grad = None
        quantized_linear(values, weight, MatmulFormats("mxfp4", hadamard=mixed)).backward(grad)
        off[mixed] = (weight.grad - exact).norm() / exact.norm()
    assert off[True] < off[False] / 1.2
    found = torch.zeros(64, 32)
    for _ in range(64):
        weight.grad = None
        formats = MatmulFormats("mxfp4", generator=draws)
        quantized_linear(values, weight, formats).backward(grad)
        found += weight.grad / 64
    unbiased = grad.T @ quantize(values.T, "mxfp4").T  # the values are rounded to nearest
    assert (found - unbiased).norm() / exact.norm() < off[False] / 2
