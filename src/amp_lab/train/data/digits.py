"""The handwritten digits that come with scikit-learn: no folder and no network."""

from typing import Any

import numpy as np
import torch

from amp_lab.core.requirements import needed_for
from amp_lab.train.data.images import ImagesInMemory, affine, shorten, split
from amp_lab.train.data.samples import DataSplits, LoadOptions, fingerprint

MEAN_STD = ((0.305,) * 3, (0.376,) * 3)  # of the pixels in [0, 1], of each channel


def load(options: LoadOptions) -> DataSplits:
    """Load the 1,797 digits, which need no folder; one in five is a test image."""
    with needed_for("the data set digits"):
        from sklearn.datasets import load_digits  # here, since it takes a second to load

    digits: Any = load_digits()  # a Bunch; with other arguments it would be a tuple
    targets = digits.target.astype(np.int64)
    levels = digits.images * (255 / 16)  # scikit-learn's grey levels are 0 to 16
    pixels = levels.round().astype(np.uint8)
    images = pixels[:, None]  # (1797, 1, 8, 8); a set of images makes three channels of one
    all_train, all_test = split(targets, every=5)
    train, test = shorten(all_train, all_test, targets, options.limit)
    size = options.image_size
    return DataSplits(
        name="digits",
        train=ImagesInMemory(
            images[train], targets[train], size, MEAN_STD, seed=options.seed, augment=jitter
        ),
        test=ImagesInMemory(images[test], targets[test], size, MEAN_STD),
        classes=tuple(map(str, digits.target_names)),
        sample_shape=(3, size, size),  # the three channels are equal
        fingerprint=fingerprint(images, targets, train, test),
    )


def jitter(draws: torch.Tensor) -> torch.Tensor:
    """Matrices (B, 2, 3) that rotate by up to 10 degrees, scale by up to 10 %, and shift.

    The shift is up to 1/16 of the image. `draws` (B, 4) are random numbers in [0, 1).
    """
    centred = 2 * draws - 1  # from -1 to 1
    turn, zoom, x, y = centred.unbind(1)  # each (B,)
    angle = turn * np.pi / 18  # up to 10 degrees
    scale = 1 + zoom / 10
    x = x / 8  # up to 1/16 of a side, which has 2 units of `grid_sample`
    y = y / 8
    # No mirroring, unlike for photographs: a mirrored digit is no digit.
    return affine(torch.ones_like(x), angle, scale, x, y)
