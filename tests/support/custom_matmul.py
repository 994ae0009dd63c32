"""An `autograd.Function` that knows nothing of autocast, and a model with it."""

import torch
from torch import nn


class CustomMatmul(torch.autograd.Function):
    """A product whose backward pass meets fp32 weights with fp16 gradients under autocast."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class CustomMatmulModel(nn.Module):
    def __init__(self, function=CustomMatmul):
        super().__init__()
        self.first, self.function = nn.Linear(8, 8), function
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return self.function.apply(self.first(x), self.weight)
