"""Matmuls that are taken out of a running model: with an exact one nothing changes."""

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


class HuggingFace(Mixture):
    """Experts whose weights lie as a linear layer's do; the second is given nothing."""

    def forward(self, values):
        ends = torch.tensor([3, 3, 7], dtype=torch.int32)
        return F.grouped_mm(values, self.experts.view(3, 32, 16).transpose(-2, -1), offs=ends)


class Expert(nn.Module):
    """Experts as one parameter, multiplied one after the other."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 32, 16))

    def forward(self, values):
        parts = values.tensor_split([2, 2])
        return torch.cat(
            [F.linear(part, one) for part, one in zip(parts, self.experts, strict=True)]
        )


class Views(nn.Module):
    """A weight that is multiplied both ways, whole and in part."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32))

    def forward(self, values):
        inner = torch.mm(values, self.weight) + F.linear(values, self.weight.T)
        return (
            inner @ self.weight.T
            + inner.mm(self.weight.mT)
            + F.linear(inner[:, :8], self.weight[:, :8])
        )


class Keywords(nn.Module):
    """A convolution whose options have names."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, 3, 3))

    def forward(self, values):
        return F.conv2d(values, self.weight, padding=1, stride=2)


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
    "keywords": (Keywords(), (2, 4, 9, 9), "convolution"),
    "grouped": (Mixture(), (7, 16), "grouped"),
    "grouped, transposed": (HuggingFace(), (7, 16), "grouped"),
    "one expert": (Expert(), (7, 16), "linear"),
    "views": (Views(), (8, 16), "linear"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # with an even window
@pytest.mark.parametrize("name", CASES)
def test_with_an_exact_matmul_output_and_gradients_are_the_same(name):
    model, shape, kind = CASES[name]
    dtype = next(model.parameters()).dtype
    values = torch.randn(shape, dtype=dtype)
    expected = model(values)
    grads = torch.autograd.grad(expected.float().square().sum(), [*model.parameters()])
    seen = []

    def choose_matmul(layer):
        seen.append(layer)
        return lambda rows, weight: rows @ weight.T

    with intercepted(model, choose_matmul) as others:
        found = model(values)
    assert {layer.kind for layer in seen} == {kind}
    assert not others
    close = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(found, expected, **close)
    again = torch.autograd.grad(found.float().square().sum(), [*model.parameters()])
    torch.testing.assert_close(again, grads, **close)


def test_layers_have_the_names_of_their_modules_and_sizes_of_a_matmul():
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


def left_to_torch(model, run):
    with intercepted(model, lambda layer: lambda rows, weight: rows @ weight.T) as others:
        run()
    return {op: [*names] for op, names in others.items()}


def test_what_multiplies_in_another_way_is_left_to_torch_and_named():
    attention = nn.MultiheadAttention(16, 2)
    up = nn.ConvTranspose2d(4, 8, 3)
    model = nn.ModuleList([attention, up, nn.Conv3d(1, 1, 1), nn.LSTM(16, 8, 2), nn.GRUCell(16, 8)])
    values = torch.randn(5, 2, 16)

    def run():
        attention(values, values, values)
        up(torch.randn(1, 4, 5, 5))
        model[2](torch.randn(1, 1, 2, 2, 2, requires_grad=True))
        model[3](values)
        model[4](values[0])
        values @ torch.randn(16, 3)  # of no parameter

    assert left_to_torch(model, run) == {
        "multi_head_attention_forward": ["0.in_proj_weight"],
        "conv_transpose2d": ["1.weight"],
        "conv3d": ["2.weight"],
        "lstm": ["3.weight_ih_l0"],
        "gru_cell": ["4.weight_ih"],
    }


def test_weights_that_are_computed_first_are_named_and_activations_are_not():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.low = nn.Parameter(torch.randn(16, 16)), nn.Linear(4, 16, bias=False)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
            self.experts, self.position = nn.Parameter(torch.randn(2, 16, 16)), nn.Embedding(8, 16)
            self.register_buffer("mask", torch.ones(16, 16))

        def forward(self, x):
            x = x + self.position(torch.arange(8))
            x = self.normed(F.linear(x, self.weight / self.weight.norm()))
            x = x @ (self.weight * self.mask + self.low.weight @ torch.randn(4, 16))
            x = torch.bmm(x.expand(2, 8, 16), self.experts).sum(0)
            x = torch.einsum("ti,io->to", x, self.experts[0])
            one = self.experts[(x[:, 0] > 0).long()]  # an expert for each row
            x = torch.baddbmm(torch.zeros(8, 1, 16), x[:, None], one)[:, 0]
            keys = self.normed.bias + torch.zeros(8, 16).index_add_(0, torch.arange(8), x)
            return torch.matmul(x @ keys.mT, x).softmax(-1)  # of activations alone

    model = Model()
    assert left_to_torch(model, lambda: model(torch.randn(8, 16))) == {
        "linear": ["weight", "normed.parametrizations.weight.original1"],
        "matmul": ["low.weight", "weight"],
        "bmm": ["experts"],
        "einsum": ["experts"],
        "baddbmm": ["experts"],
    }
