"""Notebook 02: what its text says of autocast without a cell that shows it."""

import pytest
import torch
import torch.nn.functional as F

BF16 = torch.bfloat16


def test_a_pass_without_gradients_leaves_no_cast_without_a_graph_in_the_cache():
    inputs, weight = torch.rand(4, 4), torch.rand(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=BF16):
        with torch.no_grad():
            inputs @ weight
        output = inputs @ weight
    (gradient,) = torch.autograd.grad(output.float().sum(), weight)
    assert gradient.count_nonzero() == gradient.numel()


@pytest.mark.parametrize("cached", [True, False])
def test_the_cache_gives_an_inner_block_the_dtype_of_the_outer_one(cached):
    inputs, weight = torch.rand(4, 4), torch.rand(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=BF16):
        inputs @ weight
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=cached):
            if cached:
                with pytest.raises(RuntimeError, match="same dtype"):
                    inputs @ weight
            else:
                assert (inputs @ weight).dtype is torch.float16


def test_the_gradient_of_binary_cross_entropy_may_not_fit_into_fp16():
    unlikely = torch.tensor([2.0**-24], requires_grad=True)  # the smallest probability in fp16
    F.binary_cross_entropy(unlikely, torch.ones(1)).backward()
    assert unlikely.grad.isfinite()
    assert unlikely.grad.half().isinf()
