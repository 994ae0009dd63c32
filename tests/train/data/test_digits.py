"""The digits: those of scikit-learn, and how they are moved about."""

import pytest
import torch
from data_sets import all_of

from amp_lab import load_dataset
from amp_lab.train.data import digits as digits_module

pytest_plugins = ("data_sets",)


def test_digits_are_those_of_scikit_learn_split_four_to_one_in_each_class(digits):
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    whole = torch.bincount(torch.cat([digits.train.targets, digits.test.targets]))
    assert (torch.bincount(digits.test.targets) - whole / 5).abs().max() < 1
    assert digits.classes == tuple("0123456789")
    assert not digits.stand_in


def test_digits_look_like_the_originals(digits):
    from sklearn.datasets import load_digits

    small = load_dataset("digits", image_size=8, augment=False)
    mean, std = digits_module.MEAN_STD
    images = torch.cat([all_of(small.train)[0], all_of(small.test)[0]])
    pixels = images[:, 0] * std[0] + mean[0]
    originals = torch.from_numpy(load_digits().images).float() / 16
    assert pixels.sum() == pytest.approx(originals.sum().item(), rel=1e-2)  # none lost, none twice
    distances = torch.cdist(pixels[:20].flatten(1), originals.flatten(1))
    assert distances.min(dim=1).values.max() < 8 * 0.5 / 255 + 1e-3  # rounded to 8 bits
    assert digits.test[0][0].shape == (3, 32, 32)


def test_digits_are_moved_a_little_and_never_mirrored(digits):
    size = torch.eye(2)
    matrices = digits_module.jitter(torch.rand(1000, 4, generator=torch.Generator().manual_seed(0)))
    turn = matrices[:, :, :2]
    assert (torch.linalg.det(turn) > 0.8).all()  # a mirror image has a negative one
    assert ((turn - size).abs() < 0.3).all()
    assert matrices[:, :, 2].abs().max() <= 1 / 8  # of half a side
    assert matrices.std(dim=0).min() > 0.04
