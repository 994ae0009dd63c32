"""The convolutions of MobileNetV2 by kind, and calls that run them alone: for notebook 05."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision.models import MobileNetV2

KINDS = ("first", "pointwise", "depthwise", "depthwise, stride 2")


def kind(layer: nn.Conv2d) -> str:
    """What kind of convolution this is, one of `KINDS`."""
    if layer.groups == 1:
        return "pointwise" if layer.kernel_size == (1, 1) else "first"
    return "depthwise, stride 2" if layer.stride == (2, 2) else "depthwise"


def convolutions(batch_size: int, size: int) -> list[tuple[nn.Conv2d, torch.Size]]:
    """Each convolution of MobileNetV2 with the shape of its input, in the order of the network.

    The images have `size` pixels a side. On the meta device this computes nothing.
    """
    found = []
    with torch.device("meta"):
        model = MobileNetV2(num_classes=10)
        images = torch.zeros(batch_size, 3, size, size)
    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            hook = module.register_forward_hook(lambda m, x, _: found.append((m, x[0].shape)))
            hooks.append(hook)
    model(images)
    for hook in hooks:
        hook.remove()
    return found


def run_layers_of(
    name: str, batch_size: int, size: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """A function that runs all convolutions of one kind forward and backward, on random images."""
    calls = [
        _run_alone(layer, shape, dtype, device)
        for layer, shape in convolutions(batch_size, size)
        if kind(layer) == name
    ]

    def call_all() -> None:
        for call in calls:
            call()

    return call_all


def _run_alone(
    layer: nn.Conv2d, input_shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """A function that runs a convolution of the same settings, under autocast unless in fp32."""
    options: dict[str, Any] = {
        "kernel_size": layer.kernel_size,
        "stride": layer.stride,
        "padding": layer.padding,
        "groups": layer.groups,
        "bias": False,
    }
    copy = nn.Conv2d(layer.in_channels, layer.out_channels, **options)
    copy = _channels_last(copy, device)
    images = torch.randn(input_shape, device=device).to(dtype, memory_format=torch.channels_last)
    images.requires_grad_()

    def call() -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            output = copy(images)
        output.backward(output.detach())

    return call


def _channels_last(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on the device, with its weights in channels last."""
    return module.to(device).to(memory_format=torch.channels_last)
