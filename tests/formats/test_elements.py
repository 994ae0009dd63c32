"""Formats of 8 bits and fewer: their numbers, and rounding to them."""

import pytest
import torch

from amp_lab.formats import ELEMENTS

INF, NAN = float("inf"), float("nan")
OF_TORCH = [e for e in ELEMENTS.values() if e.bits == 8 and e.name != "int8"]


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_number_stays_what_it_is_however_it_is_rounded(name):
    numbers = ELEMENTS[name].numbers()
    assert numbers[-1] == ELEMENTS[name].largest
    assert numbers[numbers > 0].min() == ELEMENTS[name].smallest
    draws = torch.Generator().manual_seed(0)
    assert torch.equal(ELEMENTS[name].round(numbers), numbers)
    for _ in range(20):
        assert torch.equal(ELEMENTS[name].round(numbers, draws), numbers)


@pytest.mark.parametrize("form", OF_TORCH, ids=lambda e: e.name)
def test_the_numbers_and_the_rounding_are_those_of_torchs_dtype(form):
    codes = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()
    assert torch.equal(form.numbers(), codes[codes.isfinite()].unique())
    torch.manual_seed(0)
    values = torch.randn(2**16) * torch.exp2(torch.randint(-20, 16, (2**16,)).float())
    numbers = form.numbers()
    between = (numbers[1:] + numbers[:-1]) / 2  # ties, and what lies just beside them
    values = torch.cat([values, between, between.nextafter(values[:1]), numbers])
    values = values.clamp(-form.largest, form.largest)
    assert torch.equal(form.round(values), values.to(form.dtype).float())


def test_the_small_formats_are_those_of_the_specification():
    halves = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert ELEMENTS["e2m1"].numbers().tolist() == [*(-h for h in halves[:0:-1]), *halves]
    assert (ELEMENTS["e2m3"].smallest, ELEMENTS["e3m2"].smallest) == (0.125, 0.0625)
    assert [len(ELEMENTS[name].numbers()) for name in ("e2m3", "e3m2", "int8")] == [63, 63, 255]


def test_ties_go_to_the_even_number_and_what_is_too_large_to_the_largest():
    found = ELEMENTS["e2m1"].round(torch.tensor([0.25, 0.75, 2.5, 5.0, 5.1, 7.0, INF, -INF, NAN]))
    assert found[:-1].tolist() == [0, 1, 2, 4, 6, 6, 6, -6]
    assert found[-1].isnan()


def test_stochastic_rounding_is_right_on_average_and_repeats_with_its_seed():
    values = torch.tensor([2.2, -0.1, 5.0, 0.3]).repeat(100_000, 1)
    form = ELEMENTS["e2m1"]
    found = form.round(values, torch.Generator().manual_seed(0))
    below = torch.tensor([2.0, -0.5, 4.0, 0.0])
    above = torch.tensor([3.0, 0.0, 6.0, 0.5])
    assert bool(((found == below) | (found == above)).all())
    spread = ((values[0] - below) * (above - values[0])).sqrt() / len(values) ** 0.5
    assert bool(((found.mean(0) - values[0]).abs() < 5 * spread).all())
    assert torch.equal(found, form.round(values, torch.Generator().manual_seed(0)))


def test_the_values_stay_as_they_are():
    values = torch.tensor([0.3, 9.0])
    ELEMENTS["e2m1"].round(values)
    assert torch.equal(values, torch.tensor([0.3, 9.0]))
