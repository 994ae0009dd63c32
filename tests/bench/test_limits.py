"""What a step has to do, counted, and the limits that it is held against."""

import pytest
import torch
from torch import nn

from amp_lab.bench.limits import Ceilings, count_step


def test_count_of_a_linear_layer():
    model, inputs = nn.Linear(8, 4, bias=False), torch.randn(16, 8)
    count = count_step(lambda: model(inputs), model, inputs, training=False)
    assert count.flops == 2 * 16 * 8 * 4
    assert count.moved_bytes == 4 * (16 * 8 + 8 * 4 + 16 * 4)
    assert count.least_bytes == 4 * (16 * 8 + 8 * 4)
    step = lambda: model(inputs).sum().backward()  # noqa: E731
    trained = count_step(step, model, inputs, training=True)
    assert trained.flops == 2 * count.flops  # the input needs no gradient
    assert trained.least_bytes == 4 * (16 * 8 + 6 * 8 * 4)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_count_of_a_grouped_convolution(groups):
    """Forward, gradient of the input and gradient of the weight take the same."""
    model = nn.Conv2d(8, 16, 3, padding=1, groups=groups, bias=False)
    images = torch.randn(2, 8, 5, 5, requires_grad=True)
    step = lambda: model(images).sum().backward()  # noqa: E731
    forward = 2 * 2 * 16 * 5 * 5 * (8 // groups) * 3 * 3
    assert count_step(step, model, images, training=True).flops == 3 * forward


def test_a_view_moves_nothing():
    x = torch.randn(4, 4)
    assert count_step(lambda: x.T.reshape(-1, 2).T, nn.ReLU(), x, training=False).moved_bytes == (
        2 * 64  # the transposed copy is read and written, the views are not
    )


def ceilings(**changes):
    given = {
        "flops_per_s": {"fp32": 100.0, "tf32": None, "fp16": 100.0, "bf16": 400.0},
        "stream_bytes_per_s": {64: 10.0, 1024: 20.0, 4096: 5.0},
        "trusted": True,
    }
    return Ceilings(**given | changes)


@pytest.mark.parametrize(("nbytes", "rate"), [(8, 20), (64, 20), (2000, 20), (4096, 5), (9999, 5)])
def test_what_fits_in_a_cache_may_be_copied_faster(nbytes, rate):
    assert ceilings().stream_rate(nbytes) == rate


def test_floor_is_the_longer_of_work_and_traffic():
    assert ceilings().floor_s("fp32", 1000, 40) == 10
    assert ceilings().floor_s("fp32", 1000, 4096) == 4096 / 5
    assert ceilings().floor_s("tf32", 1000, 40) is None
