"""Faults planted in small models, for find_nonfinite: each with where it must be found."""

import functools
import math

import torch
import torch.nn.functional as F
from small_models import CellRnn, Cnn, Rnn, Transformer, images, series, tokens
from torch import nn

from amp_lab import NonfiniteReport, find_nonfinite


class Module(nn.Module):
    """A linear layer, and `function` of its output and of the module."""

    def __init__(self, function, width=3):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.fault = Function(function)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        return self.last(self.fault(self.first(x)))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Overflowing(torch.autograd.Function):
    """Fine forward; its gradient overflows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e30 * 1e30


class BadForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x - x) / (x - x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def run(model, x, loss_fn=lambda y: y.square().mean(), autocast=None, scaler=None):
    enabled = autocast is not None
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=enabled):
        loss = loss_fn(model(x))
    (loss if scaler is None else scaler.scale(loss)).backward()


def faulty(function, **options):
    """A fault in the module `fault` between two linear layers."""
    return lambda: (Module(function), torch.randn(2, 3), options)


def changed(model, data, change, **options):
    def make():
        net = model()
        with torch.no_grad():
            x = change(net, data())
        return net, x, options

    return make


def at(tensor, value, index=0):
    tensor.view(-1)[index] = value


def poison(name, value):
    def change(net, x):
        at(net.get_parameter(name) if name in dict(net.named_parameters()) else
           net.get_buffer(name), value)  # fmt: skip
        return x

    return change


def poison_data(value):
    def change(net, x):
        at(x, value)
        return x

    return change


def sharpen(net, x):
    """Attention scores beyond 65504, from queries and keys that fit."""
    net.blocks[1].qkv.weight.mul_(300)
    net.embed.weight.mul_(30)
    return x


def grow(name, factor):
    def change(net, x):
        net.get_parameter(name).mul_(factor)
        return x

    return change


def overflow_gates(net, x):
    """Step 1 makes the hidden state 1; in step 2 the reset gate, 0, multiplies an infinity."""
    for part in net.cell.parameters():
        part.zero_()
    reset, update, new = range(0, 4), range(4, 8), range(8, 12)
    net.cell.bias_ih[new] = 100
    net.cell.bias_ih[update] = -100
    net.cell.weight_hh[reset] = -3e38
    net.cell.weight_hh[new] = 3e38
    return x


def mask_all(net, x):
    net.blocks[0].mask.fill_(-math.inf)
    return x


def eval_poison(name, value):
    def change(net, x):
        net.eval()
        return poison(name, value)(net, x)

    return change


def zero_norm(x):
    x = x * 0
    return x / x.norm(dim=-1, keepdim=True)


def in_place(x):
    y = x.clone()
    y[0].sub_(y[0]).log_()
    return y


HALF = {"autocast": torch.float16}
BAD_TARGET = torch.tensor([[math.nan, 0.0, 0.0], [0.0, 0.0, 0.0]])
FAULTS = {
    # name: (how to make it, phase, module, op, tensor)
    # What was there before
    "inf in a weight": (
        changed(Cnn, images, poison("features.0.weight", math.inf)),
        "before", "features.0", None, "parameter",
    ),
    "NaN in a bias": (
        changed(Transformer, tokens, poison("blocks.1.out.bias", math.nan)),
        "before", "blocks.1.out", None, "parameter",
    ),
    "inf in the weight of an RNN": (
        changed(Rnn, series, poison("rnn.weight_hh_l0", -math.inf)),
        "before", "rnn", None, "parameter",
    ),
    "inf in a running variance": (
        changed(Cnn, images, eval_poison("features.1.running_var", math.inf)),
        "before", "features.1", None, "buffer",
    ),
    "NaN in a running mean": (
        changed(Cnn, images, eval_poison("features.1.running_mean", math.nan)),
        "before", "features.1", None, "buffer",
    ),
    "NaN in a mask": (
        changed(Transformer, tokens, poison("blocks.0.mask", math.nan)),
        "before", "blocks.0", None, "buffer",
    ),
    "NaN in the images": (
        changed(Cnn, images, poison_data(math.nan)), "before", "", None, "input",
    ),
    "inf in a series": (
        changed(CellRnn, series, poison_data(math.inf)), "before", "", None, "input",
    ),
    "NaN in the target": (
        lambda: (Cnn(), images(), {"loss_fn": functools.partial(F.mse_loss, target=BAD_TARGET)}),
        "before", None, None, "constant",
    ),
    # Forward, in models
    "a cast to fp16 that overflows": (
        changed(Cnn, images, lambda net, x: x * 1e6, **HALF),
        "forward", "features.0", "_to_copy", "output",
    ),
    "a convolution that overflows fp16": (
        changed(Cnn, images, grow("features.0.weight", 6e4), **HALF),
        "forward", "features.0", "convolution", "output",
    ),
    "a linear layer that overflows fp16": (
        changed(Cnn, images, grow("head.weight", 3e5), **HALF),
        "forward", "head", "addmm", "output",
    ),
    "attention scores that overflow fp16": (
        changed(Transformer, tokens, sharpen, loss_fn=lambda y: y.float().mean(), **HALF),
        "forward", "blocks.1", "bmm", "output",
    ),
    "a gate of a GRU cell that overflows fp32": (
        changed(CellRnn, series, overflow_gates),
        "forward", "cell", "addmm", "output",
    ),
    "a row of attention that is masked everywhere": (
        changed(Transformer, tokens, mask_all), "forward", "blocks.0", "_softmax", "output",
    ),
    "log of zero": (faulty(lambda x: torch.log(x * 0)), "forward", "fault", "log", "output"),
    "log of a negative number": (
        faulty(lambda x: torch.log(-x.abs())), "forward", "fault", "log", "output",
    ),
    "log of a softmax that underflows": (
        faulty(lambda x: (x * 1e5).softmax(-1).log(), loss_fn=lambda y: -y.mean()),
        "forward", "fault", "log", "output",
    ),
    "division by a zero norm": (faulty(zero_norm), "forward", "fault", "div", "output"),
    "exp that overflows": (
        faulty(lambda x: (x.abs() * 1e4).exp()), "forward", "fault", "exp", "output",
    ),
    "root of a negative number": (
        faulty(lambda x: (-x.abs()).sqrt()), "forward", "fault", "sqrt", "output",
    ),
    "reciprocal of zero": (
        faulty(lambda x: (x * 0).reciprocal()), "forward", "fault", "reciprocal", "output",
    ),
    "a negative base with a fractional exponent": (
        faulty(lambda x: (-x.abs()) ** 0.5001), "forward", "fault", "pow", "output",
    ),
    "zero times inf": (
        faulty(lambda x: x * 0 * torch.tensor(3e38).mul(10)), "forward", "fault", "mul", "output",
    ),
    "inf minus inf": (
        faulty(lambda x: x.double().mul(1e308).mul(1e308).sub(1).float()),
        "forward", "fault", "mul", "output",
    ),
    "acos out of its domain": (
        faulty(lambda x: torch.acos(x.abs() + 1.5)), "forward", "fault", "acos", "output",
    ),
    "deviation of a single value": (
        faulty(lambda x: x / x[:, :1].std(-1, keepdim=True)), "forward", "fault", "std", "output",
    ),
    "the mean of no values": (
        faulty(lambda x: x + x[:0].mean()), "forward", "fault", "mean", "output",
    ),
    "a custom function": (faulty(BadForward.apply), "forward", "fault", "div", "output"),
    "an operation in place, on a view": (faulty(in_place), "forward", "fault", "log_", "output"),
    "a cast of a large constant mask": (
        faulty(lambda x: (x - 1e9).half().exp().float().log().exp().log()),
        "forward", "fault", "log", "output",
    ),
    # Forward, in the loss
    "all targets ignored": (
        lambda: (
            Cnn(), images(),
            {"loss_fn": lambda y: F.cross_entropy(y, torch.tensor([-100, -100]))},
        ),
        "forward", None, "nll_loss_forward", "output",
    ),
    "a loss that overflows fp16": (
        lambda: (Cnn(), images(), {"loss_fn": lambda y: (y * 1e3).half().square().sum()}),
        "forward", None, "pow", "output",
    ),
    "cross entropy by hand": (
        lambda: (Cnn(), images(), {"loss_fn": lambda y: -(y * 0)[:, 0].log().mean()}),
        "forward", None, "log", "output",
    ),
    # Backward
    "sqrt at zero": (
        faulty(lambda x: (x * 0).sqrt()), "backward", "fault", "SqrtBackward0", "gradient",
    ),
    "a norm by hand at zero": (
        faulty(lambda x: (x * 0).square().sum(-1, keepdim=True).sqrt().expand(-1, 3)),
        "backward", "fault", "SqrtBackward0", "gradient",
    ),
    "a power below one at zero": (
        faulty(lambda x: (x * 0) ** 0.5), "backward", "fault", "PowBackward0", "gradient",
    ),
    "where that discards a log of zero": (
        faulty(lambda x: torch.where(x > 99, (x * 0).log(), x)),
        "backward", "fault", "LogBackward0", "gradient",
    ),
    "acos at one": (
        faulty(lambda x: torch.acos((x * 0).cos())),
        "backward", "fault", "AcosBackward0", "gradient",
    ),
    "a custom backward": (
        faulty(Overflowing.apply), "backward", "fault", "OverflowingBackward", "gradient",
    ),
    "deviation of equal values": (
        faulty(lambda x: (x * 0).var(-1, keepdim=True).sqrt() * x),
        "backward", "fault", "SqrtBackward0", "gradient",
    ),
    "the distance of a point to itself": (
        faulty(lambda x: ((x - x).square().sum(-1) ** 0.5)[:, None] + x),
        "backward", "fault", "PowBackward0", "gradient",
    ),
    "a gradient that overflows fp32": (
        faulty(lambda x: x * 0 * 1e30 * 1e30), "backward", "fault", "MulBackward0", "gradient",
    ),
    "the loss scale overflows fp16": (
        lambda: (
            Cnn(), images(),
            {"loss_fn": lambda y: y.float().square().sum() * 1e3, **HALF,
             "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**30)},
        ),
        "backward", None, "ToCopyBackward0", "gradient",
    ),
}  # fmt: skip


def find(model, x, **options) -> NonfiniteReport | None:
    """What is found in one step of training."""
    with find_nonfinite(model) as finder:
        run(model, x, **options)
    return finder.report
