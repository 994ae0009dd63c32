"""The handwritten digits that come with scikit-learn: no folder and no network."""

from typing import Any

import numpy as np
import torch

from amp_lab.core.requirements import needed_for
from amp_lab.train.data.images import (
    ImageData,
    ImagesInMemory,
    LoadOptions,
    fingerprint,
    shorten,
    split,
)

MEAN_STD = ((0.305,) * 3, (0.376,) * 3)


def load(options: LoadOptions) -> ImageData:
    """1,797 digits; one in five is a test image. See `load_dataset`."""
    with needed_for("the data set digits"):
        from sklearn.datasets import load_digits  # takes a second, which others do not need

    digits: Any = load_digits()  # a Bunch; with other arguments it would be a tuple
    targets = digits.target.astype(np.int64)
    levels = digits.images * (255 / 16)
    pixels = levels.round().astype(np.uint8)
    images = pixels[:, None]  # (1797, 1, 8, 8)
    all_train, all_test = split(targets, every=5)
    train, test = shorten(all_train, all_test, targets, options.limit)
    size = options.image_size or 32
    return ImageData(
        name="digits",
        train=ImagesInMemory(images[train], targets[train], size, MEAN_STD, options.seed, jitter),
        test=ImagesInMemory(images[test], targets[test], size, MEAN_STD),
        classes=tuple(map(str, digits.target_names)),
        image_size=size,
        fingerprint=fingerprint(images, targets, train, test),
    )


def jitter(draws: torch.Tensor) -> torch.Tensor:
    """Matrices that turn by up to 10 degrees, scale by up to 10 %, shift by up to 1/16 a side."""
    centred = 2 * draws - 1  # from -1 to 1
    turn, zoom, x, y = centred.unbind(1)  # each (B,)
    angle = turn * np.pi / 18
    scale = 1 + zoom / 10
    x = x / 8
    y = y / 8
    cos = scale * angle.cos()
    sin = scale * angle.sin()
    # No mirroring, unlike for photographs: a mirrored digit is no digit.
    rows = torch.stack([cos, -sin, x, sin, cos, y], dim=1)
    return rows.view(-1, 2, 3)
