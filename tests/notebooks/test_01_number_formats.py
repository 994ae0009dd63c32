"""Notebook 01: what its text says of formats without a cell that shows it, and its helpers."""

import math

import pytest
import torch

from course.digits import activation_gradients, load_images, new_network, train
from course.number_formats import FORMATS, INTEGER, LIMITS, spacing_by_magnitude, to_tf32

each_format = pytest.mark.parametrize("name", LIMITS)


def rounded(numbers, name):
    """`numbers` in a format, as float64."""
    if name == "tf32":
        return to_tf32(numbers.float()).double()
    return numbers.to(FORMATS[name]).double()


def test_tf32_rounds_like_fp16_where_that_has_its_full_precision_and_goes_on_beyond():
    torch.manual_seed(0)
    numbers = torch.randn(10_000)
    numbers = numbers[numbers.abs() > LIMITS["fp16"].normal]
    assert torch.equal(to_tf32(numbers), numbers.half().float())
    assert to_tf32(torch.tensor(1e30)).isfinite()


@each_format
def test_the_last_bit_alone_is_the_smallest_number(name):
    dtype = FORMATS.get(name, torch.float32)
    bits = torch.tensor(2**13 if name == "tf32" else 1, dtype=INTEGER[dtype.itemsize])
    assert bits.view(dtype).item() == LIMITS[name].subnormal


@each_format
def test_the_relative_spacing_is_eps_at_normal_powers_of_two_and_1_at_the_smallest(name):
    exponents, spacing, normal = spacing_by_magnitude(name)
    of_normal = {s for e, s in zip(exponents, spacing, strict=True) if e >= normal}
    assert of_normal == {LIMITS[name].eps}
    assert spacing[0] == 1  # the smallest number and the next: it, and twice it
    of_subnormal = [s for e, s in zip(exponents, spacing, strict=True) if e < normal]
    assert len(of_subnormal) > 1
    assert of_subnormal == sorted(set(of_subnormal), reverse=True)  # smaller number, larger spacing


def test_the_relative_spacing_falls_to_half_before_the_next_power_of_two():
    below_2 = (torch.tensor(2.0).half().view(torch.int16) - 1).view(torch.float16).double()
    assert 0.5 < (2 - below_2) / below_2 / LIMITS["fp16"].eps < 0.51


@each_format
def test_one_rounding_errs_by_half_of_eps_at_most(name):
    numbers = torch.linspace(1, 2, 10_001, dtype=torch.float64)
    error = ((rounded(numbers, name) - numbers) / numbers).abs().max().item()
    bound = LIMITS[name].eps / 2
    assert 0.85 * bound < error <= bound
    expected = {"bf16": 0.004, "fp16": 0.0005}
    assert bound == pytest.approx(expected.get(name, bound), rel=0.05)


def test_ties_go_up_as_often_as_down_and_the_order_of_a_sum_matters_in_fp32_too():
    numbers = torch.arange(2048.0, 2057)
    assert (numbers.half().float() - numbers).sum() == 0
    assert torch.tensor(683.0).half() * 3 == 2048  # 2049
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert (big + one) + one != big + (one + one)


def test_bf16_ends_a_little_before_fp32():
    assert torch.tensor(LIMITS["fp32"].largest).bfloat16() == math.inf


def test_below_1_an_update_of_half_the_size_is_lost():
    for name in ("fp32", "fp16", "bf16"):
        one, quarter = torch.ones((), dtype=FORMATS[name]), LIMITS[name].eps / 4
        assert one - quarter == one
        assert one - 1.01 * quarter < one


def test_a_product_of_two_fp16_numbers_fits_into_fp32():
    torch.manual_seed(0)
    a, b = torch.rand(8192).half(), torch.rand(8192).half()
    assert torch.equal((a.float() * b.float()).double(), a.double() * b.double())


def test_e5m2_has_infinities_and_e4m3_has_none():
    for name, infinities, nans in (("fp8 E5M2", 2, 6), ("fp8 E4M3", 0, 2)):
        every = torch.arange(256, dtype=torch.uint8).view(FORMATS[name]).float()
        assert (every.isinf().sum(), every.isnan().sum()) == (infinities, nans)
        assert every[every.isfinite()].max() == LIMITS[name].largest


def test_what_is_too_large_for_e4m3_becomes_448_or_nan():
    numbers = torch.tensor([448.0, 464.0, 1000.0, math.inf])
    assert rounded(numbers, "fp8 E5M2").tolist() == [448, 448, 1024, math.inf]
    found = rounded(numbers, "fp8 E4M3")
    assert found[:2].tolist() == [448, 448]
    assert ((found[2:] == 448) | found[2:].isnan()).all()


def test_the_mean_and_confidence_make_the_gradients_of_the_logits_small():
    images, labels = load_images(torch.device("cpu"))
    inputs, targets = images[:1024], labels[:1024]
    model, medians = new_network(inputs.device), {}
    for stage in ("untrained", "trained"):
        gradients = activation_gradients(model, inputs, targets)[-1]
        probabilities = model(inputs).softmax(dim=1)
        expected = (probabilities - torch.nn.functional.one_hot(targets, 10)) / len(targets)
        # p - 1 cancels when p is near 1, and leaves the rounding error of 1, 1e-7, divided by 1024.
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=2e-10)
        medians[stage] = gradients[gradients != 0].abs().median().log2()
        train(model, images, labels)
    assert medians["trained"] < medians["untrained"] - 10
