"""A toy of NVIDIA Apex's `amp` in plain torch, for notebook 13.

The main parts of `apex.amp` as it last was (commit e13873d): its levels, its loss scale, its
patched functions, its fp32 master weights, and the two calls of a training loop. It needs no GPU.
"""

import functools
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

fp32, fp16 = torch.float32, torch.float16


class Level(NamedTuple):
    """What an optimization level stood for, under Apex's names."""

    cast_model_type: torch.dtype | None  # weights and inputs are cast to it
    patch_torch_functions: bool  # ops cast their inputs
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None  # the optimizer has fp32 copies of the weights
    loss_scale: float | str


LEVELS = {
    "O0": Level(fp32, False, None, False, 1.0),
    "O1": Level(None, True, None, None, "dynamic"),
    "O2": Level(fp16, False, True, True, "dynamic"),
    "O3": Level(fp16, False, False, False, 1.0),
}


class LossScale:
    """A loss scale as Apex had it."""

    def __init__(self, loss_scale):
        self.dynamic = loss_scale == "dynamic"
        self.scale = 2.0**16 if self.dynamic else loss_scale
        self.unskipped, self.window, self.highest = 0, 2000, 2.0**24

    def update(self, overflow):
        """Change the scale after a backward pass; whether to skip the step."""
        if overflow and self.dynamic:
            self.scale, self.unskipped = self.scale / 2, 0
            return True
        self.unskipped += 1
        if self.unskipped == self.window and self.dynamic:
            self.scale, self.unskipped = min(self.highest, 2 * self.scale), 0
        return False


WHITE = {F.linear, F.conv2d, torch.matmul}
BLACK = {F.mse_loss, F.cross_entropy, F.softmax, torch.exp}


def cast(values, dtype):
    """The same values, with floating-point tensors in this dtype."""
    is_float = [isinstance(v, torch.Tensor) and v.is_floating_point() for v in values]
    return tuple(v.to(dtype) if f else v for v, f in zip(values, is_float, strict=True))


class PatchedFunctions(TorchFunctionMode):
    """Casts the inputs of functions on the lists, as O1 did."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in WHITE or func in BLACK:
            args = cast(args, fp16 if func in WHITE else fp32)
        return func(*args, **(kwargs or {}))


def cast_model(model, dtype, keep_batchnorm_fp32):
    """Cast a model's weights, and from now on its inputs; its outputs are fp32."""
    model.to(dtype)
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.float()
    model.register_forward_pre_hook(lambda _, args: cast(args, dtype))
    model.register_forward_hook(lambda _, args, output: output.float())


def make_masters(optimizer):
    """Replace fp16 parameters in the optimizer by fp32 copies; pairs of model's and master."""
    pairs = []
    for group in optimizer.param_groups:
        for i, weight in enumerate(group["params"]):
            if weight.dtype is fp16:
                group["params"][i] = weight.detach().float().requires_grad_()
                pairs.append((weight, group["params"][i]))
    return pairs


class Scaling:
    """The part of Apex's `amp` that a training loop called."""

    pairs: list  # (weight in fp16, its master in fp32)
    loss_scale: LossScale
    skip: bool  # whether the last gradients overflowed

    def master_params(self, optimizer):
        """The parameters that the optimizer updates."""
        return (p for group in optimizer.param_groups for p in group["params"])

    @contextmanager
    def scale_loss(self, loss, optimizer):
        """Hand out the scaled loss; afterwards unscale and check the gradients of the masters."""
        for weight, _ in self.pairs:
            weight.grad = None
        used = self.loss_scale.scale
        yield loss.float() * used
        for weight, master in self.pairs:
            master.grad = weight.grad.float()
        gradients = [p.grad for p in self.master_params(optimizer)]
        overflow = not all(g.isfinite().all() for g in gradients)
        for gradient in gradients:
            gradient.mul_(1 / used)
        self.skip = self.loss_scale.update(overflow)


class ToyApex(Scaling, ExitStack):
    """What Apex's `amp` did, in a block: `with ToyApex() as amp`."""

    def initialize(self, model, optimizer, opt_level="O1"):
        """Prepare model and optimizer for a level, and return them."""
        level = LEVELS[opt_level]
        if level.cast_model_type is fp16:
            cast_model(model, fp16, level.keep_batchnorm_fp32)
        if level.patch_torch_functions:
            self.enter_context(PatchedFunctions())
        self.pairs = make_masters(optimizer) if level.master_weights else []
        self.loss_scale, self.skip = LossScale(level.loss_scale), False
        optimizer.step = functools.partial(self.step, optimizer.step)
        return model, optimizer

    @torch.no_grad()
    def step(self, original):
        """Step unless a gradient overflowed, and copy the masters to the model."""
        if not self.skip:
            original()
            for weight, master in self.pairs:
                weight.copy_(master)
