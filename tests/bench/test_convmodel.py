import math

import pytest
import torch

from amp_lab.bench.convmodel import ConvModel, quantized_sine


def test_the_example_has_the_shapes_and_ranges_it_says():
    inputs, target = quantized_sine(32)
    assert inputs.shape == (1, 2, 32, 32)
    assert target.shape == (1, 1, 32, 32)
    assert inputs.dtype is target.dtype is torch.float32
    assert inputs.amin() == target.amin() == 0
    assert inputs.amax() == target.amax() == 1


def test_x_grows_to_the_right_and_y_downwards():
    inputs, _ = quantized_sine(5)
    steps = torch.tensor([0, 0.25, 0.5, 0.75, 1])
    assert torch.equal(inputs[0, 0], steps.expand(5, 5))
    assert torch.equal(inputs[0, 1], steps.expand(5, 5).T)


def test_the_target_is_the_quantized_sum_of_two_waves():
    size = 65
    _, target = quantized_sine(size)
    for row in range(0, size, 7):
        for column in range(0, size, 7):
            x, y = column / (size - 1), row / (size - 1)
            wave = math.cos(4 * 2 * math.pi * x) + math.cos(2 * 2 * math.pi * y)
            level = target[0, 0, row, column].item() * 3
            assert level == pytest.approx(round(level), abs=1e-6)
            assert abs(level - (wave + 2) / 4 * 3) <= 0.5 + 1e-4  # the nearest of four levels


def test_all_four_levels_occur():
    _, target = quantized_sine(64)
    torch.testing.assert_close(target.unique(), torch.tensor([0, 1 / 3, 2 / 3, 1]))


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_picture_needs_two_pixels(size):
    with pytest.raises(ValueError, match="must be at least 2"):
        quantized_sine(size)


def test_the_network_maps_two_channels_to_one_and_has_the_layers_it_should():
    model = ConvModel(hidden=16)
    assert model(torch.randn(3, 2, 8, 8)).shape == (3, 1, 8, 8)
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["Conv2d", "BatchNorm2d", "ReLU"] * 3 + ["Conv2d"]
    assert all(layer.kernel_size == (1, 1) for layer in model if isinstance(layer, torch.nn.Conv2d))


def test_the_network_in_its_real_size():
    count = sum(p.numel() for p in ConvModel().parameters())
    assert count == (2 * 256 + 256) + 2 * (256 * 256 + 256) + (256 + 1) + 3 * 2 * 256
