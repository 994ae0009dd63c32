"""The largest value of each module, whatever it returns."""

import math

import pytest
import torch
from torch import nn

from amp_lab.numerics import largest_values


class Several(nn.Module):
    def forward(self, x):
        return {"first": x, "others": [3 * x, None, torch.tensor([9])]}


def test_modules_are_named_with_their_largest_magnitude_in_order():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    found = largest_values(model, torch.tensor([[2.0, 5.0]]))
    assert found == {"0": 5, "1": 2, "": 2}
    assert list(found) == ["0", "1", ""]


def test_all_tensors_and_all_calls_count():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Several()

        def forward(self, x):
            self.inner(x)
            return self.inner(x / 2)["first"]

    assert largest_values(Twice(), torch.tensor([-4.0])) == {"inner": 12, "": 2}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_infinite(value):
    assert largest_values(nn.Identity(), torch.tensor([1.0, value])) == {"": math.inf}


def test_no_hook_stays_when_the_model_fails():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError):
        largest_values(model, torch.ones(1, 3))
    assert not model[0]._forward_hooks


def test_overflow_is_found_before_the_cast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    x = torch.ones(1, 8)
    assert largest_values(model, x)["0"] > torch.finfo(torch.float16).max
    assert not model.half()(x.half()).isfinite().all()
