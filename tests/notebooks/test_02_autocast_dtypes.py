"""Notebook 02: what its text says of autocast without a cell that shows it."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

from course.autocast_rules import OPS, OpLog, outcome, policy_of

BF16 = torch.bfloat16


def dtype_of(op, *args):
    with torch.autocast("cpu", dtype=BF16):
        return op(*args).dtype


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


def test_the_end_of_an_inner_block_does_not_clear_the_cache():
    """AMP0171."""
    inputs, weight = torch.rand(4, 4), torch.rand(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=BF16):
        before = inputs @ weight
        with torch.no_grad():
            weight.mul_(2)
        with torch.autocast("cpu", dtype=BF16):
            pass
        assert torch.equal(inputs @ weight, before)


def test_the_gradient_of_binary_cross_entropy_may_not_fit_into_fp16():
    unlikely = torch.tensor([2.0**-24], requires_grad=True)  # the smallest probability in fp16
    F.binary_cross_entropy(unlikely, torch.ones(1)).backward()
    assert unlikely.grad.isfinite()
    assert unlikely.grad.half().isinf()


def test_an_explicit_dtype_gets_fp32_from_an_op_that_is_not_listed():
    narrow = torch.rand(4, 4).to(BF16)
    assert dtype_of(lambda: narrow.softmax(-1)) is BF16
    assert dtype_of(lambda: narrow.softmax(-1, dtype=torch.float32)) is torch.float32


def test_an_op_that_is_not_listed_may_call_one_that_is():
    has_rule = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not has_rule("aten::einsum", "AutocastCPU")
    assert has_rule("aten::bmm", "AutocastCPU")
    wide = torch.rand(4, 4)
    assert dtype_of(torch.einsum, "ij,jk->ik", wide, wide) is BF16
    assert dtype_of(torch.einsum, "ij,ij->ij", wide, wide) is torch.float32  # without `bmm`


def test_float64_and_integers_are_not_cast_and_do_not_mix():
    wide = torch.rand(4, 4)
    assert dtype_of(torch.matmul, wide.double(), wide.double()) is torch.float64
    assert dtype_of(torch.prod, wide.long()) is torch.int64
    with pytest.raises(RuntimeError, match="same dtype"):
        dtype_of(torch.matmul, wide.double(), wide)


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps"])
def test_autocast_for_a_device_that_is_not_there_casts_nothing(name):
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    on_the_cpu = torch.rand(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autocast(name):
            assert (on_the_cpu @ on_the_cpu).dtype is torch.float32
    assert torch.amp.is_autocast_available(name)  # built in, whether or not it is plugged in
    assert bool(caught) == (name == "cuda")  # the others say nothing


@pytest.mark.parametrize(("inside", "dtype"), [(False, "fp32"), (True, "bf16")])
def test_backward_inside_the_block_lowers_a_product_that_was_fp32(inside, dtype):
    wide, weight = torch.rand(4, 4), torch.rand(4, 4, requires_grad=True)
    loss = (wide @ weight).sum()
    with OpLog() as log, torch.autocast("cpu", dtype=BF16, enabled=inside):
        loss.backward()
    assert log.dtypes("mm") == [[dtype] * 2]


def test_a_thread_begins_without_autocast_unless_the_function_is_decorated():
    wide, found = torch.rand(4, 4), []
    decorated = torch.autocast("cpu", dtype=BF16)(torch.matmul)
    with torch.autocast("cpu", dtype=BF16):
        for function in (torch.matmul, decorated):
            thread = threading.Thread(target=lambda f: found.append(f(wide, wide)), args=[function])
            thread.start()
            thread.join()
    assert [result.dtype for result in found] == [torch.float32, BF16]


def test_promote_helps_an_op_that_refuses_mixed_inputs():
    wide, first_row = torch.zeros(4, 4), torch.zeros(1, dtype=torch.long)

    def copy_row(a, b):
        return a.index_copy(0, first_row, b[:1])

    with pytest.raises(RuntimeError, match="dtype"):
        copy_row(wide, wide.to(BF16))
    assert dtype_of(copy_row, wide, wide.to(BF16)) is torch.float32
    assert dtype_of(copy_row, wide.to(BF16), wide.to(BF16)) is BF16
    assert torch.cat([wide, wide.to(BF16)]).dtype is torch.float32  # by itself


def test_all_backends_have_the_same_policy_from_linear_to_add_fp32():
    names = list(OPS)
    common = names[names.index("linear") : names.index("add fp32") + 1]
    policies = []
    for backend in ("cpu", "cuda", "xpu", "mps"):
        with policy_of(backend) as low:
            found = {name: outcome(OPS[name], backend, low) for name in common}
        policies.append({name: dtype == "fp32" for name, dtype in found.items()})
    assert all(policy == policies[0] for policy in policies)
