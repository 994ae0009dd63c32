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


class Attention(nn.Module):
    """That of docs/when_it_breaks.md; or its products inside of torch's own module."""

    def __init__(self, whole):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(16, 16) for _ in range(3))
        self.whole = nn.MultiheadAttention(16, 2, batch_first=True) if whole else None

    def forward(self, x):
        queries, keys, values = 300 * self.queries(x), 300 * self.keys(x), self.values(x)
        if self.whole:
            return self.whole(*3 * [10 * queries])[0]
        return (queries @ keys.mT).softmax(-1) @ values


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_module_computes_on_the_way_counts(whole):
    torch.manual_seed(0)
    model, x = Attention(whole).eval(), torch.randn(4, 8, 16)
    found = largest_values(model, x)
    over = [name for name, value in found.items() if value > torch.finfo(torch.float16).max]
    assert over == ["whole" if whole else ""]
    assert torch.backends.mha.get_fastpath_enabled()
    assert max(found["queries"], found["keys"], found["values"]) < 10
    assert model.half()(x.half()).isnan().any()


class Masked(nn.Module):
    def __init__(self, value, how):
        super().__init__()
        self.value, self.how = value, how

    def forward(self, x):
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        if self.how == "fill":
            x = x.masked_fill(~mask, self.value)
        if self.how == "where":
            x = torch.where(mask, x, torch.tensor(self.value))
        if self.how == "add":
            x = x + torch.zeros(4, 4).masked_fill(~mask, self.value)
        return torch.arange(100_000)[x.argmax()], x.softmax(-1)


@pytest.mark.parametrize("value", [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("how", ["fill", "where", "add"])
def test_masks_and_integers_are_no_values(value, how):
    assert largest_values(Masked(value, how), -torch.ones(4, 4)) == {"": 1}
    assert largest_values(Masked(-1e9, how), -torch.ones(4, 4))[""] == pytest.approx(1e9)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True))).to(x.dtype) * self.weight


def test_what_stays_in_fp32_does_not_count():
    x = torch.full((2, 4), 1000.0)
    assert largest_values(Norm().bfloat16(), x.bfloat16()) == {"": 1}
    assert largest_values(Norm(), x)[""] == 1e6  # it could be fp16's own
    assert largest_values(nn.RMSNorm(4), x) == {"": 1}
    assert nn.RMSNorm(4).half()(x.half()).max() == 1


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_infinite(value):
    assert largest_values(nn.Identity(), torch.tensor([1.0, value])) == {"": math.inf}


def test_no_hook_stays_when_the_model_fails():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError):
        largest_values(model, torch.ones(1, 3))
    assert not model[0]._forward_hooks


def test_ops_of_hooks_before_the_model_are_nobodys():
    model = nn.Linear(2, 2, bias=False)
    model.register_forward_pre_hook(lambda module, given: (1e6 * given[0] / 1e6,))
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    assert largest_values(model, torch.ones(1, 2)) == {"": 1}


def test_overflow_is_found_before_the_cast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    x = torch.ones(1, 8)
    assert largest_values(model, x)["0"] > torch.finfo(torch.float16).max
    assert torch.tensor([65519.0, 65520.0]).half().isinf().tolist() == [False, True]
    assert not model.half()(x.half()).isfinite().all()
