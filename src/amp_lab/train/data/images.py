"""What every data set is made of: images with targets, their split, and their random changes."""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from torch.utils.data import Dataset, default_collate
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2.functional import center_crop
from tqdm import tqdm

from amp_lab.core.errors import DataError, first_line
from amp_lab.core.files import open_regular
from amp_lab.core.report import listed
from amp_lab.train.data.tokens import Characters, Tokens

MARKER = "STAND_IN.json"  # in the folder of generated pictures, so that none takes them for real
# Those of ImageNet, since the networks trained on it start from weights that were made with these.
IMAGENET_MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PHOTOGRAPH_SIZE = 224  # pixels
# What torchvision's ImageFolder takes. Not whatever Pillow knows: for an EPS it would start
# Ghostscript, whatever the file is called.
_FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")
_MOST_BYTES = 2**30  # of a picture; Pillow's limit of pixels is 0.5 GiB at most
# What random numbers are for; part of their seed, so that the two differ.
SHUFFLE = 1
AUGMENT = 2


class ImageSet(Dataset):
    """Images of one size with their targets: a map-style data set whose keys also name the epoch.

    `dataset[epoch * len(dataset) + index]` is an image, float32 (3, S, S) and normalised, and its
    target, an int. How it is augmented depends only on the seed, the epoch and the index: which
    process reads it, when, and after what makes no difference to any bit of it. The global random
    state is neither used nor changed.
    """

    targets: torch.Tensor
    """The targets of all images, int64 (N,)."""
    reads_files = False
    """Whether each image is read from a file when it is asked for, so that workers pay."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        images, targets = self.batch([index])
        return images[0], int(targets[0])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return (self[index] for index in range(len(self)))  # one pass; keys alone never end

    def batch(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Images float32 (B, 3, S, S) and targets int64 (B,) of these keys.

        Raises `DataError` if a file cannot be read, and `IndexError` for a negative key.
        """
        images, targets = self.read(keys)
        return self.finish(images), targets

    def read(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """As `batch`, but images may still be uint8, which is quicker to hand on; see `finish`."""
        raise NotImplementedError

    def finish(self, images: torch.Tensor) -> torch.Tensor:
        """The images of `batch` from those of `read`, where these are: the same bits everywhere."""
        return images

    def _epochs_and_indices(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        smallest = min(keys)
        if smallest < 0:
            raise IndexError(f"key {smallest} is negative")
        count = len(self)
        return [divmod(key, count) for key in keys]


@dataclass(frozen=True)
class ImageData:
    """A data set, split into training and test images."""

    name: str
    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]  # their names; a target is an index into them
    image_size: int  # height and width of the images handed out, in pixels
    fingerprint: str
    """Hash of which images are in it, and of their split and order; not of how they are augmented.
    A run that finds another one trains on other data."""
    stand_in: bool = False  # generated pictures in the layout of the real ones
    skipped: tuple[str, ...] = ()  # the damaged images that were left out
    tokens: Tokens | None = None
    """What a text is cut into. Its passages stand for images, their length for `image_size`, and
    the tokens for classes."""

    @property
    def is_text(self) -> bool:
        """Whether it is a text."""
        return self.tokens is not None

    @property
    def described(self) -> str:
        """How many there are of what, in a line."""
        size = self.image_size
        name = self.name
        if self.stand_in:
            name += " (generated stand-in)"
        counts = f"{len(self.train)} training and {len(self.test)} test"
        if not self.is_text:
            return f"{name}: {counts} images of {size}x{size}, {len(self.classes)} classes"
        unit = "byte pairs"
        if isinstance(self.tokens, Characters):
            unit = "characters"
        different = f"{len(self.classes):,} different ones"
        return f"{name}: {counts} passages of {size} {unit}, {different}"


@dataclass(frozen=True)
class LoadOptions:
    """What `load_dataset` was asked for, already checked; each data set's `load` takes one."""

    folder: Path
    image_size: int | None  # None: the size that is usual for the data set
    limit: int | None
    seed: int | None  # of the augmentation; None: no augmentation
    skip_damaged: bool
    download: bool


def generator(*parts: int) -> torch.Generator:
    """A random generator for the CPU; close numbers give seeds that have nothing in common."""
    sequence = np.random.SeedSequence(parts)
    (seed,) = sequence.generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seed))


def _shuffled_classes(targets: np.ndarray) -> np.ndarray:
    """Indices sorted by class, and each class shuffled, in a way that is always the same."""
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(len(targets))
    return np.lexsort((shuffled, targets))


def split(targets: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and test images: of each class, one in `every` (give or take one)."""
    order = _shuffled_classes(targets)
    place = np.arange(len(order)) % every
    is_test = place == every - 1
    train = order[~is_test]
    test = order[is_test]
    return np.sort(train), np.sort(test)


def _choose(targets: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` images, of which each class has its share (give or take one)."""
    order = _shuffled_classes(targets)
    classes = targets[order]
    sizes = np.bincount(targets)
    starts = np.cumsum(sizes) - sizes  # where each class begins in the order
    rank = np.arange(len(order)) - starts[classes]
    depth = (rank + 0.5) / sizes[classes]  # of an image in its class, from 0 to 1
    by_depth = np.argsort(depth, kind="stable")
    chosen = order[by_depth[:count]]
    return np.sort(chosen)


def shorten(
    train: np.ndarray, test: np.ndarray, targets: np.ndarray, limit: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The two lists of indices, shortened to `limit` training images and the same share of test."""
    if limit is None or limit >= len(train):
        return train, test
    test_limit = math.ceil(len(test) * limit / len(train))
    kept_train = _choose(targets[train], limit)
    kept_test = _choose(targets[test], test_limit)
    return train[kept_train], test[kept_test]


def fingerprint(*parts: bytes | np.ndarray) -> str:
    """A hash of all parts, 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            content = part.tobytes()
        else:
            content = part
        # With its length, so that moving bytes from one part to the next changes the hash.
        length = len(content).to_bytes(8, "little")
        digest.update(length + content)
    return digest.hexdigest()


class _Augmented(ImageSet):
    """Images of a `source`, normalised, and with a `seed` augmented, each by a matrix for `_warp`.

    `mean_std` are those of the three channels, for pixels in [0, 1]. `augment` makes the matrices
    of random numbers (B, 4) in [0, 1).
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
        # One product and one sum for (pixel / 255 - mean) / std; a grey channel becomes three here.
        self._scale = 1 / (255 * std)
        self._offset = -mean / std
        self._seed = seed
        self._augment = augment

    def _indices_and_matrices(self, keys: Sequence[int]) -> tuple[list[int], torch.Tensor | None]:
        """The indices of these keys, and matrices (B, 2, 3); None if nothing is augmented."""
        places = self._epochs_and_indices(keys)
        indices = [index for _, index in places]
        if self._seed is None or self._augment is None:
            return indices, None
        count = len(self)
        draws = [_draws(count, self._seed, epoch)[index] for epoch, index in places]
        matrices = self._augment(torch.stack(draws))
        return indices, matrices


class ImagesInMemory(_Augmented):
    """Images from an array uint8 (N, C, H, W), C being 1 or 3, augmented a batch at a time."""

    def read(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ImageSet.read`."""
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


@lru_cache(maxsize=2)  # all of an epoch at once is cheap
def _draws(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Numbers in [0, 1) for every image of a data set in this epoch, (count, 4)."""
    rng = generator(seed, epoch, AUGMENT)
    return torch.rand(count, 4, generator=rng)


def _warp(images: torch.Tensor, matrices: torch.Tensor, size: int) -> torch.Tensor:
    """Images (B, C, size, size) whose pixel at x is that of `images` at matrix · (x, y, 1).

    Coordinates are those of `grid_sample`, from -1 to 1; `matrices` is (B, 2, 3). What comes from
    outside is black.
    """
    odd_numbers = 2 * torch.arange(size) + 1
    line = odd_numbers / size - 1  # the middles of the pixels
    a, b, c = matrices[..., None, None].unbind(2)  # each (B, 2, 1, 1)
    # Not `affine_grid`, which does this as a matrix product: the last bit of that may depend on
    # the size of the batch and the number of threads.
    grid = (a * line + b * line[:, None]).add_(c)  # (B, 2, size, size)
    grid = grid.permute(0, 2, 3, 1)
    return functional.grid_sample(images, grid, align_corners=False)


class ImagesOnDisk(_Augmented):
    """Images read from the paths of their files when asked for, and uint8 until `finish`."""

    reads_files = True

    def read(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ImageSet.read`."""
        indices, matrices = self._indices_and_matrices(keys)
        if matrices is None:
            images = [self._image(index, None) for index in indices]
        else:
            each = zip(indices, matrices.split(1), strict=True)
            images = [self._image(index, matrix) for index, matrix in each]
        # In a worker this collects them in shared memory, where the process that trains has them.
        return default_collate(images), self.targets[indices]

    def _image(self, index: int, matrix: torch.Tensor | None) -> torch.Tensor:
        picture = read_picture(self._source[index])[None]
        edge = round(self._size * 8 / 7)  # 256 for 224
        size = (edge, edge)
        resized = functional.interpolate(picture, size, mode="bilinear", antialias=True)
        if matrix is None:
            return center_crop(resized[0], [self._size])
        (warped,) = _warp(resized.float(), matrix, self._size)
        return warped.round_().byte()

    def finish(self, images: torch.Tensor) -> torch.Tensor:
        """See `ImageSet.finish`."""
        if images.device.type == "cpu":  # numpy's memory has huge pages: far fewer page faults
            memory = torch.from_numpy(np.empty(images.shape, np.float32))
            images = memory.copy_(images)
        scale = self._scale.to(images.device)
        offset = self._offset.to(images.device)
        return images.float().mul_(scale).add_(offset)


def jitter(draws: torch.Tensor) -> torch.Tensor:
    """Matrices that crop 7/8, mirror half, turn by up to 15 degrees and scale by up to 10 %."""
    centred = 2 * draws - 1  # from -1 to 1
    turn, zoom, x, y = centred.unbind(1)  # each (B,)
    is_mirrored = turn < 0  # its sign mirrors, and its size turns
    flip = 1 - 2 * is_mirrored.float()
    share_of_turn = 2 * turn.abs() - 1
    angle = share_of_turn * np.pi / 12
    zoom_factor = 1 + zoom / 10
    scale = 7 / 8 / zoom_factor
    x = x / 8
    y = y / 8
    cos = scale * angle.cos()
    sin = scale * angle.sin()
    rows = torch.stack([flip * cos, -sin, x, flip * sin, cos, y], dim=1)
    return rows.view(-1, 2, 3)


def find_damaged(folder: Path, paths: list[str]) -> list[str]:
    """Those of these files that cannot be decoded."""

    def is_damaged(path: str) -> bool:
        try:
            read_picture(folder / path)
        except DataError:
            return True
        return False

    if not paths:
        return []
    with ThreadPoolExecutor() as pool:  # threads do, since Pillow decodes without Python's lock
        found = pool.map(is_damaged, paths)
        progress = tqdm(found, "checking images", len(paths), unit="image", disable=None)
        checked = zip(paths, progress, strict=True)
        return [path for path, damaged in checked if damaged]


def damaged_error(damaged: Sequence[str], count: int, folder: Path) -> DataError:
    """The error for such images among so many in `folder`, with what to do about them."""
    examples = listed(damaged, 3)
    return DataError(
        f"{len(damaged)} of {count} images cannot be read, {examples} in {folder}; put good ones "
        "in their place, or leave them out: skip_damaged=True, on the command line --skip-damaged"
    )


def read_picture(path: Path) -> torch.Tensor:
    """The picture in this file, uint8 (3, H, W); raises `DataError` if it cannot be decoded."""
    try:
        with open_regular(path) as file, Image.open(file, formats=_FORMATS) as picture:
            status = os.fstat(file.fileno())
            _require_reasonable(status.st_size, picture)
            if picture.format == "JPEG":
                with suppress(Exception):  # torchvision is faster; where it fails, Pillow says why
                    return decode_image(str(path), ImageReadMode.RGB)
            pixels = np.array(picture.convert("RGB"))
            return torch.from_numpy(pixels).permute(2, 0, 1)
    except Exception as error:  # a decoder may raise anything for a damaged file
        raise DataError(f"{path} cannot be read as an image: {first_line(error)}") from None


def _require_reasonable(nbytes: int, picture: Image.Image) -> None:
    """Raise `ValueError` for a file or a picture that would fill the memory."""
    if nbytes > _MOST_BYTES:
        raise ValueError(f"{nbytes:,} bytes are too many")
    pixels = picture.width * picture.height
    most_pixels = Image.MAX_IMAGE_PIXELS or math.inf
    if pixels > most_pixels:
        raise ValueError(f"{picture.width} x {picture.height} pixels are too many")


def remedy(place: Path) -> str:
    """What to do about a folder that is not what it should be."""
    return f"delete {place} to have it fetched (or generated) again"
