"""Shared by the data sets of images: their split, augmentation and decoding."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from torch.utils.data import default_collate
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2.functional import center_crop
from tqdm import tqdm

from amp_lab.core.errors import DataError, first_line
from amp_lab.core.files import open_regular
from amp_lab.core.report import listed
from amp_lab.train.data.samples import (
    AUGMENT,
    DataSplits,
    LoadOptions,
    SampleSet,
    fingerprint,
    generator,
)

MARKER = "STAND_IN.json"  # a file in the folder of generated pictures, which marks them as such
# Mean and standard deviation of each channel. torchvision's pretrained weights expect ImageNet's.
IMAGENET_MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# The formats of torchvision's ImageFolder. Pillow would open more, by the content and not by the
# name: for an EPS it would start Ghostscript.
_FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")
_MAX_FILE_BYTES = 2**30  # a picture with as many pixels as Pillow opens has at most 0.5 GiB


def _shuffled_classes(targets: np.ndarray) -> np.ndarray:
    """Indices of the images sorted by class, in random order within a class; always the same."""
    rng = np.random.default_rng(0)
    random_order = rng.permutation(len(targets))
    return np.lexsort((random_order, targets))  # NumPy's first key is the last of the tuple


def split(targets: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and test images, with one in `every` of each class for the test.

    Both are sorted. A class may have one test image more or fewer than its share.
    """
    order = _shuffled_classes(targets)
    position = np.arange(len(order)) % every
    is_test = position == every - 1
    train = order[~is_test]
    test = order[is_test]
    return np.sort(train), np.sort(test)


def _choose(targets: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` images, chosen so that each class keeps its share (give or take one).

    `targets` (N,) are the classes of all images.
    """
    order = _shuffled_classes(targets)
    classes = targets[order]
    sizes = np.bincount(targets)
    starts = np.cumsum(sizes) - sizes  # where each class begins in `order`
    position = np.arange(len(order)) - starts[classes]  # of an image in its class
    relative_position = (position + 0.5) / sizes[classes]  # from 0 to 1
    # Sorted by relative position, the first tenth of all images is the first tenth of each class.
    by_position = np.argsort(relative_position, kind="stable")
    chosen = order[by_position[:count]]
    return np.sort(chosen)


def shorten(
    train: np.ndarray, test: np.ndarray, targets: np.ndarray, limit: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The indices of `limit` training images, and of the same share of the test images.

    `train` and `test` are the indices of all images, and `targets[index]` is the class of one.
    Without a limit, `train` and `test` are returned as they are.
    """
    if limit is None or limit >= len(train):
        return train, test
    test_limit = math.ceil(len(test) * limit / len(train))
    kept_train = _choose(targets[train], limit)
    kept_test = _choose(targets[test], test_limit)
    return train[kept_train], test[kept_test]


class _Augmented(SampleSet):
    """Images that are normalised and, if there is a `seed`, augmented.

    `source` is what a subclass reads the images from: an array, or a list of paths.
    `targets` (N,) are their classes, and `size` is the side S of an image, in pixels.
    `mean_std` has the mean and the standard deviation of each channel, for pixels in [0, 1].
    `augment` turns random numbers (B, 4) in [0, 1) into the matrices (B, 2, 3) that `_warp` takes.
    """

    def __init__(
        self,
        source: Any,
        targets: np.ndarray,
        size: int,
        mean_std: tuple[tuple[float, ...], tuple[float, ...]],
        seed: int | None = None,
        augment: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self._source = source
        self._size = size
        int64_targets = targets.astype(np.int64)
        self.targets = torch.from_numpy(int64_targets)
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in mean_std)
        # pixel * scale + offset is (pixel / 255 - mean) / std. Since both have three channels,
        # broadcasting makes three of a grey one.
        self._scale = 1 / (255 * std)
        self._offset = -mean / std
        self._seed = seed
        self._augment = augment

    def __len__(self) -> int:
        return len(self.targets)

    def _indices_and_matrices(self, keys: Sequence[int]) -> tuple[list[int], torch.Tensor | None]:
        """The indices of these keys, and the matrices (B, 2, 3) that augment their images.

        The matrices are None if there is no augmentation.
        """
        epochs_and_indices = self._epochs_and_indices(keys)
        indices = [index for _, index in epochs_and_indices]
        if self._seed is None or self._augment is None:
            return indices, None
        count = len(self)
        draws = [_draws(count, self._seed, epoch)[index] for epoch, index in epochs_and_indices]
        matrices = self._augment(torch.stack(draws))
        return indices, matrices


class ImagesInMemory(_Augmented):
    """Images from an array uint8 (N, C, H, W), C being 1 or 3, augmented a batch at a time.

    A grey image is read with three channels too: it is normalised with the mean and the standard
    deviation of each of three.
    """

    def read(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SampleSet.read`."""
        indices, matrices = self._indices_and_matrices(keys)
        source = torch.from_numpy(self._source)
        images = source[indices].float()  # (B, C, H, W), 0 to 255
        if matrices is not None:
            images = _warp(images, matrices, self._size)
        elif images.shape[-1] != self._size:
            size = (self._size, self._size)
            images = functional.interpolate(images, size, mode="bilinear")
        images = images * self._scale
        images.add_(self._offset)
        return images, self.targets[indices]


@lru_cache(maxsize=2)  # a data set asks image by image, mostly for the same epoch
def _draws(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Four random numbers in [0, 1) for each image of a data set in one epoch, (count, 4)."""
    rng = generator(seed, epoch, AUGMENT)
    return torch.rand(count, 4, generator=rng)


def _warp(images: torch.Tensor, matrices: torch.Tensor, size: int) -> torch.Tensor:
    """Transform `images` (B, C, H, W) by affine `matrices` (B, 2, 3) into (B, C, size, size).

    The pixel at (x, y) of the result is taken from `images` at matrix · (x, y, 1), in the
    coordinates of `grid_sample`, from -1 to 1. Pixels from outside of an image are black.
    """
    odd_numbers = 2 * torch.arange(size) + 1
    line = odd_numbers / size - 1  # the centres of the pixels of a row, from -1 to 1
    a, b, c = matrices[..., None, None].unbind(2)  # the columns, each (B, 2, 1, 1)
    # Not `affine_grid`, which does this as a matmul: the last bit of that may depend on
    # the size of the batch and the number of threads.
    grid = (a * line + b * line[:, None]).add_(c)  # (B, 2, size, size)
    grid = grid.permute(0, 2, 3, 1)
    return functional.grid_sample(images, grid, align_corners=False)


class ImagesOnDisk(_Augmented):
    """Images that are read on demand from the files in `source`, and are uint8 until `finish`."""

    reads_files = True

    def read(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SampleSet.read`."""
        indices, matrices = self._indices_and_matrices(keys)
        if matrices is None:
            images = [self._image(index, None) for index in indices]
        else:
            indices_and_matrices = zip(indices, matrices.split(1), strict=True)
            images = [self._image(index, matrix) for index, matrix in indices_and_matrices]
        # In a worker, `default_collate` stacks them in memory that the main process shares.
        return default_collate(images), self.targets[indices]

    def _image(self, index: int, matrix: torch.Tensor | None) -> torch.Tensor:
        """An image uint8 (3, S, S): its centre, or what `matrix` (1, 2, 3) takes from it."""
        picture = read_picture(self._source[index])[None]  # (1, 3, H, W)
        edge = round(self._size * 8 / 7)  # 256 for 224, of which the crop is 7/8
        size = (edge, edge)
        resized = functional.interpolate(picture, size, mode="bilinear", antialias=True)
        if matrix is None:
            return center_crop(resized[0], [self._size])
        (warped,) = _warp(resized.float(), matrix, self._size)
        return warped.round_().byte()

    def finish(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `SampleSet.finish`."""
        images = inputs
        if images.device.type == "cpu":
            # NumPy allocates large arrays in huge pages, which cost far fewer page faults.
            buffer = torch.from_numpy(np.empty(images.shape, np.float32))
            images = buffer.copy_(images)
        scale = self._scale.to(images.device)
        offset = self._offset.to(images.device)
        return images.float().mul_(scale).add_(offset)


def jitter(draws: torch.Tensor) -> torch.Tensor:
    """Matrices (B, 2, 3) for `_warp` that crop 7/8 of an image at a random place.

    They also mirror half of the images, rotate by up to 15 degrees, and scale by up to 10 %.

    `draws` (B, 4) are random numbers in [0, 1).
    """
    centred = 2 * draws - 1  # from -1 to 1
    turn, zoom, x, y = centred.unbind(1)  # each (B,)
    # One number serves twice: its sign decides on mirroring, and its magnitude on the angle.
    is_mirrored = turn < 0
    flip = 1 - 2 * is_mirrored.float()
    relative_angle = 2 * turn.abs() - 1  # from -1 to 1
    angle = relative_angle * np.pi / 12  # up to 15 degrees
    zoom_factor = 1 + zoom / 10
    scale = 7 / 8 / zoom_factor
    x = x / 8  # the crop reaches from -7/8 to 7/8, so this moves it up to the edge
    y = y / 8
    return affine(flip, angle, scale, x, y)


def affine(
    flip: torch.Tensor,
    angle: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """Matrices (B, 2, 3) for `_warp`; each argument has one number for each image, (B,).

    The matrices mirror an image if `flip` is -1 and not 1, rotate by `angle`, crop to `scale` times
    the size, and shift by (`x`, `y`), in the coordinates of `grid_sample`.
    """
    cos = scale * angle.cos()
    sin = scale * angle.sin()
    first_row = torch.stack([flip * cos, -sin, x], dim=1)  # (B, 3)
    second_row = torch.stack([flip * sin, cos, y], dim=1)
    return torch.stack([first_row, second_row], dim=1)


def photographs(
    name: str,
    root: Path,
    paths: list[str],
    targets: np.ndarray,
    classes: list[str],
    indices: tuple[np.ndarray, np.ndarray],
    options: LoadOptions,
) -> DataSplits:
    """The data set `name` of image files: normalised as ImageNet's, and augmented by `jitter`.

    `paths` are relative to `root`, and `targets` (N,) are their classes. `indices` has the indices
    of the training images and of the test images.
    """
    train, test = indices
    size = options.image_size
    files = np.array([root / path for path in paths])
    # The fingerprint has the paths, since hashing all files takes long.
    names = "\n".join(Path(path).as_posix() for path in paths)
    return DataSplits(
        name=name,
        train=ImagesOnDisk(
            files[train].tolist(),
            targets[train],
            size,
            IMAGENET_MEAN_STD,
            seed=options.seed,
            augment=jitter,
        ),
        test=ImagesOnDisk(files[test].tolist(), targets[test], size, IMAGENET_MEAN_STD),
        classes=tuple(classes),
        sample_shape=(3, size, size),
        fingerprint=fingerprint(os.fsencode(names), targets, train, test),
    )


def find_damaged(folder: Path, paths: list[str]) -> list[str]:
    """The paths, relative to `folder`, of the images that cannot be decoded."""

    def is_damaged(path: str) -> bool:
        try:
            read_picture(folder / path)
        except DataError:
            return True
        return False

    if not paths:
        return []
    with ThreadPoolExecutor() as pool:  # threads suffice: Pillow releases the GIL to decode
        results = pool.map(is_damaged, paths)
        bar = tqdm(results, "checking images", len(paths), unit="image", disable=None)
        return [path for path, damaged in zip(paths, bar, strict=True) if damaged]


def damaged_error(damaged: Sequence[str], count: int, folder: Path) -> DataError:
    """The error, with the remedy, for `damaged` images among `count` images in `folder`."""
    examples = listed(damaged, 3)
    return DataError(
        f"{len(damaged)} of {count} images cannot be read, {examples} in {folder}; replace them "
        "or leave them out: skip_damaged=True, on the command line --skip-damaged"
    )


def read_picture(path: Path) -> torch.Tensor:
    """Decode an image file to uint8 (3, H, W). Raises `DataError` if it cannot be decoded."""
    try:
        with open_regular(path) as file, Image.open(file, formats=_FORMATS) as picture:
            status = os.fstat(file.fileno())
            _require_reasonable_size(status.st_size, picture)
            if picture.format == "JPEG":
                # torchvision is faster. Where it fails, Pillow may not, or its error is clearer.
                with suppress(Exception):
                    return decode_image(str(path), ImageReadMode.RGB)
            pixels = np.array(picture.convert("RGB"))
            return torch.from_numpy(pixels).permute(2, 0, 1)
    except Exception as error:  # a decoder may raise anything for a damaged file
        raise DataError(f"{path} cannot be read as an image: {first_line(error)}") from None


def _require_reasonable_size(file_bytes: int, picture: Image.Image) -> None:
    """Raise `ValueError` for a file of too many bytes, or a picture of too many pixels."""
    if file_bytes > _MAX_FILE_BYTES:
        raise ValueError(f"the file is too large ({file_bytes:,} bytes)")
    pixels = picture.width * picture.height
    max_pixels = Image.MAX_IMAGE_PIXELS or math.inf  # None switches the limit off
    if pixels > max_pixels:
        raise ValueError(f"the image is too large ({picture.width} x {picture.height} pixels)")


def remedy(folder: Path) -> str:
    """The advice for a downloaded or generated folder that is damaged or incomplete."""
    return f"delete {folder}, and download (or generate) the data again"
