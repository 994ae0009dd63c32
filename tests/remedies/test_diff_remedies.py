"""What the comparison of two runs advises, done."""

import contextlib
import copy
import re

import pytest
import torch
from remedy_tests import does, says
from torch import nn

from amp_lab import first_difference
from amp_lab.core.errors import NumericsError
from amp_lab.difference.merged_values import find_merged_values

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


@does("diff.own_inputs")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cast", ["the second", "the first"])
def test_two_models_of_other_dtypes_with_inputs_of_their_own(dtype, cast):
    a = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    b = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    b.load_state_dict(a.state_dict())
    b.to(dtype)
    x = torch.randn(4, 6)
    if cast == "the first":
        a, b, x = b, a, x.to(dtype)
    with pytest.raises(NumericsError) as refused:
        first_difference(a, b, x)
    said = str(refused.value)
    assert says("diff.own_inputs", said)
    (call,) = re.findall(r"first_difference\(.*\)$", said)
    names = {"first_difference": first_difference, "a": a, "b": b, "x": x, "torch": torch}
    assert eval(call, names) is None


def test_an_error_of_another_kind_has_no_such_advice():
    a, b = nn.Linear(6, 3), nn.Linear(5, 3)
    with pytest.raises(NumericsError) as refused:
        first_difference(a, b, torch.randn(4, 6))
    assert not says("diff.own_inputs", str(refused.value))


# Positions


class Rotary(nn.Module):
    """The sines of rotary embeddings, from positions (T,); in an fp32 region if asked to."""

    def __init__(self, region="", cast=None, scale=1.0):
        super().__init__()
        self.register_buffer("rates", 1e4 ** -torch.linspace(0, 1, 8))
        self.region = region
        self.cast = cast
        self.scale = scale

    def forward(self, positions):
        numbers = positions.float()[:, None] / self.scale
        if self.cast is not None:
            numbers = numbers.to(self.cast).float()
        with eval(self.region) if self.region else contextlib.nullcontext():
            return (numbers @ self.rates[None]).sin()


def under_autocast(model, dtype):
    def run(x):
        with torch.autocast("cpu", dtype):
            return model(x)

    return run


@does("diff.merged")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["whole", "scaled"])
def test_positions_that_16_bits_make_equal(dtype, scale):
    model, positions = Rotary(scale=scale), torch.arange(8000, 8016)
    found = first_difference(model, under_autocast(model, dtype), positions)
    assert (found.kind, found.op, found.op_b) == ("merged", "mm", "mm")
    assert says("diff.merged", found.reason)
    what = "whole numbers" if scale == 1 else "evenly spaced values"
    after = len((positions / scale).to(dtype).unique())
    assert f"16 different {what} become {after}" in found.reason
    (region,) = re.findall(r"torch\.autocast\(.*?enabled=False\)", found.reason)
    as_told = Rotary(region, scale=scale)
    assert first_difference(model, under_autocast(as_told, dtype), positions) is None
    angles = under_autocast(as_told, dtype)(positions)[:, 0]
    assert len(angles.unique()) == len(positions)


@does("diff.merged")
def test_positions_that_a_cast_makes_equal():
    positions = torch.arange(8000, 8016)
    cast = Rotary(cast=torch.bfloat16)
    found = first_difference(Rotary(), cast, positions)
    assert found is not None
    assert first_difference(Rotary(), Rotary(), positions) is None


class Scaled(nn.Module):
    """A layer whose input is multiplied with numbers that the model holds."""

    def __init__(self, numbers):
        super().__init__()
        self.register_buffer("numbers", numbers)
        self.rates = nn.Linear(1, 4)

    def forward(self, x):
        return self.rates(self.numbers[:, None].to(x.dtype)) + x


def test_a_buffer_of_positions_in_a_model_of_bf16_weights():
    a = Scaled(torch.arange(8000.0, 8016.0))
    b = copy.deepcopy(a).to(torch.bfloat16)
    x = torch.randn(16, 4)
    found = first_difference(lambda: a(x), lambda: b(x.to(torch.bfloat16)))
    assert found.kind == "merged"
    assert says("diff.merged", found.reason)


def test_values_that_are_no_positions_are_not_said_to_be_merged():
    for numbers in (
        torch.arange(16.0),  # bf16 has them all
        torch.linspace(0, 1, 16),  # stay different
        torch.full((16,), 8001.0),  # one value, rounded
        torch.randn(16).sort().values * 1e-3 + 1,  # become equal, and are spaced as they come
    ):
        model = Scaled(numbers)
        run = under_autocast(model, torch.bfloat16)
        assert first_difference(model, run, torch.randn(16, 4)) is None


def test_positions_that_both_runs_make_equal_are_no_difference():
    run = under_autocast(Rotary(), torch.bfloat16)
    assert first_difference(run, run, torch.arange(8000, 8016)) is None


def test_what_a_column_tells_apart_is_not_said_to_be_merged():
    """As rotary angles of 200 positions, of which bf16 has all, and biases by distance."""
    angles = torch.arange(200.0)[:, None] * torch.tensor([1.0, 0.66])
    distances = torch.arange(300.0) - torch.arange(300.0)[:, None]
    for exact in (angles / 2, distances / 3):
        low = exact.bfloat16()
        assert len(low.unique()) < len(exact.unique())
        assert find_merged_values(low, exact.double()) is None
    lost = find_merged_values((distances[:1] / 3).bfloat16(), (distances[:1] / 3).double())
    assert lost.before == 300
    assert lost.after == len((distances[0] / 3).bfloat16().unique())
