"""Products that are taken out of a running model: with an exact one nothing changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_lab.formats.interception import intercepted


class Mixture(nn.Module):
    """Experts as one parameter, multiplied in groups."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 16, 32).bfloat16())

    def forward(self, values):
        ends = torch.tensor([2, 5, 7], dtype=torch.int32)
        return F.grouped_mm(values, self.experts, offs=ends)


class Gpt2(nn.Module):
    """A layer whose weight lies the other way round."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(32))

    def forward(self, values):
        return torch.addmm(self.bias, values, self.weight) + values @ self.weight


CASES = {
    "linear": (nn.Linear(16, 32), (3, 5, 16), "linear"),
    "one value": (nn.Linear(16, 32, bias=False), (16,), "linear"),
    "the other way": (Gpt2(), (8, 16), "linear"),
    "conv2d": (nn.Conv2d(4, 8, 3, 2, padding=(1, 2), dilation=2), (2, 4, 9, 11), "convolution"),
    "unbatched": (nn.Conv2d(4, 8, (3, 1), padding=1), (4, 9, 11), "convolution"),
    "in groups": (nn.Conv2d(8, 16, 3, groups=4, bias=False), (2, 8, 9, 9), "convolution"),
    "same": (nn.Conv2d(4, 8, (4, 3), padding="same"), (2, 4, 9, 11), "convolution"),
    "valid": (nn.Conv2d(4, 8, 3, padding="valid"), (2, 4, 9, 11), "convolution"),
    "circular": (nn.Conv2d(4, 8, 3, 1, 1, padding_mode="circular"), (2, 4, 9, 9), "convolution"),
    "conv1d": (nn.Conv1d(4, 8, 5, stride=2, padding=2), (2, 4, 17), "convolution"),
    "conv1d, same": (nn.Conv1d(4, 8, 4, padding="same"), (2, 4, 17), "convolution"),
    "grouped": (Mixture(), (7, 16), "grouped"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # with an even window
@pytest.mark.parametrize("name", CASES)
def test_with_an_exact_product_output_and_gradients_are_the_same(name):
    model, shape, kind = CASES[name]
    dtype = next(model.parameters()).dtype
    values = torch.randn(shape, dtype=dtype)
    expected = model(values)
    grads = torch.autograd.grad(expected.float().square().sum(), [*model.parameters()])
    seen = []

    def product_of(layer):
        seen.append(layer)
        return lambda rows, weight: rows @ weight.T

    with intercepted(model, product_of) as others:
        found = model(values)
    assert {layer.kind for layer in seen} == {kind}
    assert not others
    close = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(found, expected, **close)
    again = torch.autograd.grad(found.float().square().sum(), [*model.parameters()])
    torch.testing.assert_close(again, grads, **close)


def test_layers_have_the_names_of_their_modules_and_sizes_of_a_product():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8 * 49, 10))
    seen = {}
    with intercepted(model, lambda layer: seen.setdefault(layer.name, layer) and None):
        model(torch.randn(2, 4, 9, 9))
    assert [(name, layer.inner, layer.outer) for name, layer in seen.items()] == [
        ("0", 36, 8),
        ("2", 392, 10),
    ]


def test_tied_weights_have_the_name_of_the_layer_that_multiplies():
    model = nn.ModuleDict({"embedding": nn.Embedding(32, 16), "head": nn.Linear(16, 32)})
    model["head"].weight = model["embedding"].weight
    seen = []
    with intercepted(model, lambda layer: seen.append(layer.name)):
        model["head"](model["embedding"](torch.arange(4)))
    assert seen == ["head"]


def test_what_multiplies_in_another_way_is_left_to_torch_and_named():
    attention = nn.MultiheadAttention(16, 2)
    up = nn.ConvTranspose2d(4, 8, 3)
    model = nn.ModuleList([attention, up, nn.Conv3d(1, 1, 1)])
    values = torch.randn(5, 2, 16)
    with intercepted(model, lambda layer: lambda *both: pytest.fail("not here")) as others:
        attention(values, values, values)
        up(torch.randn(1, 4, 5, 5))
        model[2](torch.randn(1, 1, 2, 2, 2))
        values @ torch.randn(16, 3)  # of no parameter
    assert others == {"nn.MultiheadAttention", "transposed convolutions", "3-D convolutions"}
