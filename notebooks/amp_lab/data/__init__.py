"""Data sets for training: read from their real files, split, augmented, and served in batches."""

import atexit
import csv
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from PIL import Image
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2
from tqdm import tqdm

from amp_lab.data.downloads import download, md5_of, reason_of, unpack
from amp_lab.errors import AmpLabError, DataError

DATASETS = ("digits", "cifar10", "caltech256")

CALTECH256_URL = "https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar"
CALTECH256_MD5 = "67b4f42ca05d46448c6bb8ecd2220f6d"

# Mean and standard deviation of the channels, for pixels in [0, 1]. Caltech-256 takes those of
# ImageNet, because the networks trained on it start from weights that were made with these.
_MEAN_STD = {
    "digits": ((0.305,) * 3, (0.376,) * 3),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "caltech256": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
_IMAGE_SIZE = {"digits": 32, "cifar10": 32, "caltech256": 224}
_LARGEST_SIZE = 1024

CIFAR10_FOLDER = CIFAR10.base_folder  # cifar-10-batches-py
CALTECH256_FOLDER = "256_ObjectCategories"
MARKER = "STAND_IN.json"  # in the folder of generated pictures, so that none takes them for real
_SUFFIXES = (".jpg", ".jpeg", ".png")

_SHUFFLE, _AUGMENT = 1, 2  # what random numbers are for


class ImageSet(Dataset):
    """Images of one size with their targets: a map-style data set whose keys also name the epoch.

    `dataset[epoch * len(dataset) + index]` is an image, float32 (3, S, S) and normalised, and its
    target, an int. How it is augmented is a pure function of the seed, the epoch and the index:
    which process reads it, when, and after what, makes no difference to any bit of it. The global
    random state is neither used nor changed.
    """

    targets: torch.Tensor
    """The targets of all images, int64 (N,)."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, key: int) -> tuple[torch.Tensor, int]:
        images, targets = self.batch([key])
        return images[0], int(targets[0])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return (self[index] for index in range(len(self)))  # one pass; keys alone never end

    def batch(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Images float32 (B, 3, S, S) and targets int64 (B,) of these keys.

        Raises `DataError` if a file cannot be read, and `IndexError` for a negative key.
        """
        raise NotImplementedError

    def _locate(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """Epoch and index of each key."""
        if min(keys) < 0:
            raise IndexError(f"key {min(keys)} is negative")
        return [divmod(key, len(self)) for key in keys]


@dataclass(frozen=True)
class ImageData:
    """A data set, split into training and test images."""

    name: str
    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    """Name of each class; a target is an index into it."""
    image_size: int
    """Height and width of the images handed out, in pixels."""
    stand_in: bool
    """Whether these are generated pictures in the layout of the real ones."""
    fingerprint: str
    """Hash of which images are in it, and of their split and order; not of how they are augmented.
    A run that finds another one trains on other data."""
    skipped: tuple[str, ...] = ()
    """The damaged images that were left out."""


def load_dataset(
    name: str,
    folder: str | Path = "data",
    *,
    image_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    augment: bool = True,
    skip_damaged: bool = False,
    download: bool = True,
) -> ImageData:
    """The data set called `name`, one of `DATASETS`, from `folder`; fetched into it if missing.

    - ``digits``: scikit-learn's 1,797 handwritten digits, which need no folder and no network. One
      in five is a test image.
    - ``cifar10``: 50,000 and 10,000 photographs in `folder`/cifar-10-batches-py.
    - ``caltech256``: 29,780 photographs in `folder`/256_ObjectCategories or
      `folder`/caltech256/256_ObjectCategories; `folder` may also be that folder itself. Every tenth
      is a test image. The first use reads every file, and writes the list caltech256.csv beside it.

    Images are handed out at `image_size` pixels a side (default: 32, 32 and 224). `limit` keeps at
    most so many training images, and of the test images the same share, rounded up; each class
    keeps its share, and which images are kept is always the same. `seed` is that of the
    augmentation of the training images, which `augment=False` switches off. `skip_damaged` leaves
    out images of Caltech-256 that cannot be decoded, and tells which in `skipped`.

    Raises `DataError` for a wrong value, and for files that are missing, damaged or altered.
    """
    if name not in DATASETS:
        raise DataError(f"there is no data set {name!r}; use {', '.join(DATASETS)}")
    size = _IMAGE_SIZE[name] if image_size is None else image_size
    if not 1 <= size <= _LARGEST_SIZE:
        raise DataError(f"image_size={size} must be between 1 and {_LARGEST_SIZE} pixels")
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit} must be at least 1, or None for all images")
    if seed < 0:
        raise DataError(f"seed={seed} must not be negative")
    if name == "digits":
        return _load_digits(size, limit, seed if augment else None)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{str(folder)!r} is a file; give the folder that holds {name}")
    seed_or_none = seed if augment else None
    try:
        if name == "cifar10":
            return _load_cifar10(folder, size, limit, seed_or_none, download)
        return _load_caltech256(folder, size, limit, seed_or_none, download, skip_damaged)
    except OSError as error:  # a folder that may not be read, a disk that fails
        raise DataError(f"{name} cannot be read: {reason_of(error)}") from error


# ---------------------------------------------------------------------------- splits and seeds


def _seed(*parts: int) -> int:
    """A 64-bit seed from several numbers; close ones give seeds that have nothing in common."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def _generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(*parts))


def _shuffled_classes(targets: np.ndarray) -> np.ndarray:
    """Indices sorted by class, and each class shuffled, in a way that is always the same."""
    return np.lexsort((np.random.default_rng(0).permutation(len(targets)), targets))


def _split(targets: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and test images: of each class, one in `every` (give or take one)."""
    order = _shuffled_classes(targets)
    test = np.arange(len(order)) % every == every - 1
    return np.sort(order[~test]), np.sort(order[test])


def _choose(targets: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` images, of which each class has its share (give or take one)."""
    order = _shuffled_classes(targets)
    sizes = np.bincount(targets)
    rank = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[targets[order]]
    depth = (rank + 0.5) / sizes[targets[order]]  # of an image in its class, from 0 to 1
    return np.sort(order[np.argsort(depth, kind="stable")[:count]])


def _limit(
    train: np.ndarray, test: np.ndarray, targets: np.ndarray, limit: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The two lists of indices, shortened to `limit` training images and the same share of test."""
    if limit is None or limit >= len(train):
        return train, test
    test_limit = -(-len(test) * limit // len(train))  # rounded up
    return train[_choose(targets[train], limit)], test[_choose(targets[test], test_limit)]


def _fingerprint(*parts: bytes | np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        part = part.tobytes() if isinstance(part, np.ndarray) else part
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


# ---------------------------------------------------------------------- images held in memory


class _ArraySet(ImageSet):
    """Images from an array uint8 (N, C, H, W), C being 1 or 3, augmented a batch at a time."""

    def __init__(
        self,
        images: np.ndarray,
        targets: np.ndarray,
        size: int,
        mean_std: tuple[tuple[float, ...], tuple[float, ...]],
        seed: int | None = None,
        warp: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.targets = torch.from_numpy(targets.astype(np.int64))
        self._images, self._size = torch.from_numpy(images), size
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in mean_std)
        self._scale, self._offset = 1 / (255 * std), -mean / std  # one product, one sum
        self._seed, self._warp = seed, warp
        self._draws: tuple[int, torch.Tensor] = (-1, torch.empty(0))  # of the epoch used last

    def batch(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        places = self._locate(keys)
        indices = torch.tensor([index for _, index in places])
        images = self._images[indices].float()  # (B, C, H, W), 0 to 255
        if self._seed is not None:
            draws = torch.stack([self._random(epoch)[index] for epoch, index in places])
            images = _warp(images, self._warp(draws), self._size)
        elif images.shape[-1] != self._size:
            images = functional.interpolate(images, (self._size,) * 2, mode="bilinear")
        return images * self._scale + self._offset, self.targets[indices]

    def _random(self, epoch: int) -> torch.Tensor:
        """Numbers in [0, 1) for every image in this epoch, (N, 4): cheap when drawn at once."""
        if self._draws[0] != epoch:
            draws = torch.rand(len(self), 4, generator=_generator(self._seed, epoch, _AUGMENT))
            self._draws = epoch, draws
        return self._draws[1]


def _warp(images: torch.Tensor, matrices: torch.Tensor, size: int) -> torch.Tensor:
    """Images (B, C, size, size) whose pixel at x is that of `images` at matrix · (x, y, 1).

    Coordinates are those of `grid_sample`, from -1 to 1; `matrices` is (B, 2, 3). What comes from
    outside is black. `affine_grid` would do the product as a matrix product, whose last bit may
    depend on the size of the batch and the number of threads.
    """
    line = (2 * torch.arange(size) + 1) / size - 1
    x, y = line[None, None, :], line[None, :, None]
    a, b, c = matrices[..., None, None].unbind(2)  # each (B, 2, 1, 1)
    grid = torch.stack([a[:, i] * x + b[:, i] * y + c[:, i] for i in (0, 1)], dim=-1)
    return functional.grid_sample(images, grid, align_corners=False)  # grid: (B, size, size, 2)


def _jitter(draws: torch.Tensor) -> torch.Tensor:
    """Matrices that turn by up to 10 degrees, scale by up to 10 %, shift by up to 1/16 a side."""
    angle, zoom, x, y = (2 * draws - 1).unbind(1)  # each (B,), -1 to 1
    angle, zoom, x, y = angle * np.pi / 18, 1 + zoom / 10, x / 8, y / 8
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    return torch.stack([cos, -sin, x, sin, cos, y], dim=1).view(-1, 2, 3)


def _flip_and_shift(draws: torch.Tensor) -> torch.Tensor:
    """Matrices that mirror half of the images, and shift by up to 4 whole pixels of 32."""
    flip, x, y, _ = draws.unbind(1)
    flip = 1 - 2 * (flip < 0.5).float()
    x, y = (((9 * shift).floor() - 4) / 16 for shift in (x, y))
    zero = torch.zeros_like(x)
    return torch.stack([flip, zero, x, zero, zero + 1, y], dim=1).view(-1, 2, 3)


def _load_digits(size: int, limit: int | None, seed: int | None) -> ImageData:
    from sklearn.datasets import load_digits

    digits = load_digits()
    targets = digits.target.astype(np.int64)
    images = (digits.images * (255 / 16)).round().astype(np.uint8)[:, None]  # (1797, 1, 8, 8)
    train, test = _limit(*_split(targets, every=5), targets, limit)
    sets = [(images[i], targets[i], size, _MEAN_STD["digits"]) for i in (train, test)]
    return ImageData(
        name="digits",
        train=_ArraySet(*sets[0], seed, _jitter),  # no mirror image: that is no digit
        test=_ArraySet(*sets[1]),
        classes=tuple(map(str, digits.target_names)),
        image_size=size,
        stand_in=False,
        fingerprint=_fingerprint(images, targets, train, test),
    )


# ------------------------------------------------------------------------------------ CIFAR-10


def _load_cifar10(
    folder: Path, size: int, limit: int | None, seed: int | None, may_download: bool
) -> ImageData:
    place = folder / CIFAR10_FOLDER
    if not place.exists():
        _fetch("cifar10", CIFAR10.url, CIFAR10.tgz_md5, place, may_download)
    reader, checksums = CIFAR10, cifar10_checksums(CIFAR10)
    if stand_in := (place / MARKER).exists():
        checksums = _read_marker(place / MARKER)
        reader = _cifar10_reader(checksums)
    try:
        train, test = (reader(folder, train=is_train) for is_train in (True, False))
    except RuntimeError:  # torchvision's, for a wrong checksum; it does not say of which file
        for name, md5 in checksums.items():
            if not (place / name).is_file():
                raise DataError(f"{place / name} is missing; {_again(place)}") from None
            if md5_of(place / name) != md5:
                raise DataError(f"{place / name} is damaged or altered; {_again(place)}") from None
        raise
    keep_train, keep_test = (np.arange(len(part)) for part in (train, test))
    targets = np.array(train.targets + test.targets)
    keep_train, keep_test = _limit(keep_train, keep_test + len(train), targets, limit)
    keep_test = keep_test - len(train)
    train_images, test_images = (part.data.transpose(0, 3, 1, 2) for part in (train, test))
    return ImageData(
        name="cifar10",
        train=_ArraySet(
            train_images[keep_train],
            targets[keep_train],
            size,
            _MEAN_STD["cifar10"],
            seed,
            _flip_and_shift,
        ),
        test=_ArraySet(
            test_images[keep_test],
            targets[len(train) :][keep_test],
            size,
            _MEAN_STD["cifar10"],
        ),
        classes=tuple(train.classes),
        image_size=size,
        stand_in=stand_in,
        fingerprint=_fingerprint(json.dumps(checksums).encode(), keep_train, keep_test),
    )


def cifar10_checksums(reader: type[CIFAR10]) -> dict[str, str]:
    """MD5 of each file that this reader reads."""
    pairs = [*reader.train_list, *reader.test_list, [reader.meta["filename"], reader.meta["md5"]]]
    return dict(pairs)


def _read_marker(marker: Path) -> dict[str, str]:
    """MD5 of each file of a stand-in for CIFAR-10."""
    try:
        checksums = json.loads(marker.read_text())["md5"]
        return {name: checksums[name] for name in cifar10_checksums(CIFAR10)}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{marker} is damaged; {_again(marker.parent)}") from error


def _cifar10_reader(checksums: dict[str, str]) -> type[CIFAR10]:
    """torchvision's reader, with these checksums in place of those of the real files."""

    attributes = {
        "train_list": [[name, checksums[name]] for name, _ in CIFAR10.train_list],
        "test_list": [[name, checksums[name]] for name, _ in CIFAR10.test_list],
        "meta": CIFAR10.meta | {"md5": checksums[CIFAR10.meta["filename"]]},
    }
    return type("StandIn", (CIFAR10,), attributes)


def _again(place: Path) -> str:
    return f"delete {place} to have it fetched (or generated) again"


# ---------------------------------------------------------------------------------- Caltech-256


class _FileSet(ImageSet):
    """Images read from their files when they are asked for."""

    def __init__(self, paths: list[Path], targets: np.ndarray, size: int, seed: int | None = None):
        self.targets = torch.from_numpy(targets)
        self._paths, self._seed = paths, seed
        larger = round(size * 8 / 7)  # 256 for 224; the crop is what moves the picture about
        crop, warp = v2.CenterCrop(size), []
        if seed is not None:
            crop = v2.RandomCrop(size)
            warp = [
                v2.RandomHorizontalFlip(),
                v2.RandomAffine(
                    degrees=15, scale=(0.9, 1.1), interpolation=v2.InterpolationMode.BILINEAR
                ),
            ]
        self._transform = v2.Compose(
            [
                v2.PILToTensor(),  # uint8
                v2.Resize((larger, larger), antialias=True),
                crop,
                *warp,
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(*_MEAN_STD["caltech256"]),
            ]
        )

    def batch(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        places = self._locate(keys)
        images = [self._image(epoch, index) for epoch, index in places]
        return torch.stack(images), self.targets[[index for _, index in places]]

    def _image(self, epoch: int, index: int) -> torch.Tensor:
        picture = _read_picture(self._paths[index])
        if self._seed is None:
            return self._transform(picture)
        with _random_state(_seed(self._seed, epoch, _AUGMENT, index)):
            return self._transform(picture)


@contextmanager
def _random_state(seed: int) -> Iterator[None]:
    """Seed the CPU's global random state, which torchvision draws from, and put it back after.

    `torch.manual_seed` would seed that of every accelerator as well.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _read_picture(path: Path) -> Image.Image:
    """The picture in this file, in RGB."""
    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > Image.MAX_IMAGE_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels are too many")
            return picture.convert("RGB")
    except Exception as error:  # what a decoder raises for a damaged file is anything
        raise DataError(f"{path} cannot be read as an image: {reason_of(error)}") from None


def _load_caltech256(
    folder: Path,
    size: int,
    limit: int | None,
    seed: int | None,
    may_download: bool,
    skip_damaged: bool,
) -> ImageData:
    place = find_caltech256(folder)
    if place is None:
        place = folder / CALTECH256_FOLDER
        _fetch("caltech256", CALTECH256_URL, CALTECH256_MD5, place, may_download)
    classes = _caltech256_classes(place)
    paths, targets, skipped = _caltech256_list(place, classes, skip_damaged)
    train, test = _limit(*_split(targets, every=10), targets, limit)
    sets = [
        ([place.parent / paths[i] for i in part], targets[part], size) for part in (train, test)
    ]
    return ImageData(
        name="caltech256",
        train=_FileSet(*sets[0], seed),
        test=_FileSet(*sets[1]),
        classes=tuple(name.partition(".")[2] for name in classes),  # 001.ak47
        image_size=size,
        stand_in=(place / MARKER).exists(),
        fingerprint=_fingerprint("\n".join(paths).encode(), targets, train, test),
        skipped=skipped,
    )


def find_caltech256(folder: Path) -> Path | None:
    """The folder 256_ObjectCategories: `folder` itself, in it, or where torchvision puts it."""
    if folder.absolute().name == CALTECH256_FOLDER:
        return folder.absolute() if folder.is_dir() else None
    for place in (folder / CALTECH256_FOLDER, folder / "caltech256" / CALTECH256_FOLDER):
        if place.is_dir():
            return place
    return None


def _caltech256_classes(place: Path) -> list[str]:
    """Names of the class folders in order. The last of the real ones, clutter, is no class."""
    names = sorted(
        entry.name
        for entry in os.scandir(place)
        if entry.is_dir() and entry.name[:3].isdecimal() and not entry.name.endswith(".clutter")
    )
    if not names:
        raise DataError(f"{place} holds no folder like 001.ak47; {_again(place)}")
    return names


def _caltech256_list(
    place: Path, classes: list[str], skip_damaged: bool
) -> tuple[list[str], np.ndarray, tuple[str, ...]]:
    """Paths relative to the list's folder, targets, and the damaged images that are not in it.

    Reads caltech256.csv beside `place`, or decodes every image and then writes it. Images that the
    list lacks are decoded each time: it never lacks a good one unnoticed.
    """
    table = place.parent / "caltech256.csv"
    there = {
        f"{place.name}/{name}/{entry.name}": target
        for target, name in enumerate(classes)
        for entry in sorted(os.scandir(place / name), key=lambda entry: entry.name)
        if entry.name.lower().endswith(_SUFFIXES)
    }
    if not there:
        raise DataError(f"{place} holds no images; {_again(place)}")
    listed = _read_table(table, there) if table.exists() else []
    damaged = _find_damaged(place.parent, sorted(there.keys() - set(listed)))
    good = [path for path in there if path not in damaged]
    if damaged and not skip_damaged:
        raise DataError(
            f"{len(damaged)} of {len(there)} images cannot be read, {_some(damaged)} in "
            f"{place.parent}; put good ones in their place, or leave them out: skip_damaged=True, "
            "on the command line --skip-damaged"
        )
    if len(good) < 10:  # one in ten is a test image, and without one nothing can be evaluated
        raise DataError(f"{place} has {len(good)} images that can be read; it takes at least 10")
    if not listed:
        _write_table(table, {path: there[path] for path in good})
    elif len(good) > len(listed):
        lacking = [path for path in good if path not in set(listed)]
        raise DataError(f"{table} lacks {_some(lacking)}; delete it to have it made again")
    return good, np.array([there[path] for path in good]), tuple(damaged)


def _some(names: list[str]) -> str:
    """The first three of these names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _find_damaged(folder: Path, paths: list[str]) -> list[str]:
    """Those of these files that cannot be decoded."""

    def is_damaged(path: str) -> bool:
        try:
            _read_picture(folder / path)
        except DataError:
            return True
        return False

    if not paths:
        return []
    with ThreadPoolExecutor() as pool:  # threads do, since Pillow decodes without Python's lock
        found = pool.map(is_damaged, paths)
        progress = tqdm(found, "checking images", len(paths), unit="image", disable=None)
        return [path for path, damaged in zip(paths, progress, strict=True) if damaged]


def _read_table(table: Path, there: dict[str, int]) -> list[str]:
    """The paths in the list of images. `there` has the images in the folder, and their targets."""
    remedy = "correct it, or delete the file to have it made again"
    listed: set[str] = set()
    try:
        with table.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file, strict=True)
            for column in ("path", "target"):
                if column not in (rows.fieldnames or []):
                    raise DataError(f"{table}, line 1: no column {column!r}; {remedy}")
            for row in rows:
                path, target, line = row["path"], row["target"], rows.line_num
                if path not in there:
                    raise DataError(f"{table}, line {line}: no image {path!r} there; {remedy}")
                if target != str(there[path]):
                    wrong = f"target {target!r} should be {there[path]}, as the folder is numbered"
                    raise DataError(f"{table}, line {line}: {wrong}; {remedy}")
                if path in listed:
                    raise DataError(f"{table}, line {line}: {path} is there twice; {remedy}")
                listed.add(path)
    except (OSError, UnicodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read: {reason_of(error)}; {remedy}") from error
    if not listed:
        raise DataError(f"{table} lists no images; {remedy}")
    return list(listed)


def _write_table(table: Path, targets: dict[str, int]) -> None:
    temporary = table.with_name(f".{table.name}.{os.getpid()}")
    try:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["path", "target"])
            rows.writerows(targets.items())
        temporary.replace(table)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(
            f"{table} cannot be written: {reason_of(error)}; if the images lie where you may not "
            f"write, link {CALTECH256_FOLDER} into a folder where you may"
        ) from error


def _fetch(name: str, url: str, md5: str, place: Path, may_download: bool) -> None:
    """Download the archive of a data set and unpack the folder `place` from it."""
    folder = place.parent
    try:
        if not may_download:
            raise DataError(f"there is no {place}, and downloading is switched off")
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{name}.lock"):  # all processes of a distributed run come here
            if not place.exists():
                archive = folder / url.rpartition("/")[2]
                if not archive.exists():
                    download(url, archive, md5=md5)
                unpack(archive, place)
    except (OSError, DataError) as error:
        raise DataError(
            f"no {name}: {reason_of(error)}. To do it by hand, unpack {url} in {folder}; to try "
            f"without, make pictures: make_stand_in({name!r}, {str(folder)!r})"
        ) from error


# ------------------------------------------------------------------------------------ batches


def batches(
    dataset: ImageSet,
    batch_size: int,
    *,
    epoch: int = 0,
    seed: int | None = None,
    start: int = 0,
    drop_last: bool = False,
    share: tuple[int, int] = (0, 1),
    workers: int = 0,
    device: torch.device | str = "cpu",
) -> "_Batches":
    """One pass over `dataset`: images float32 (B, 3, S, S) and targets int64 (B,), on the CPU.

    With a `seed` the order is a permutation that depends on it and on `epoch` alone; without, it is
    that of the data set. It begins at batch number `start`, and reads none before it. The last
    batch has what is left over, unless `drop_last` leaves it out.

    `share` is the rank of this process and their number n: of each batch it gets every n-th
    image, which is what `torch.utils.data.DistributedSampler` gives it from the same order. All get
    as many batches, so a last one that has not an image for each goes with the one before it.

    `workers` processes read ahead; with none, this one reads. Starting them takes a tenth of a
    second each pass on Linux and seconds elsewhere, so it pays for files that must be decoded, not
    for images in memory. For a CUDA `device` the batches lie in pinned memory, from which
    `non_blocking=True` copies them while the host goes on. `len()` gives the number of batches,
    those before `start` not counted.

    Raises `DataError` for a wrong value; iterating raises it for a file that cannot be read.
    """
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} must be at least 1")
    if workers < 0:
        raise DataError(f"workers={workers} must not be negative")
    if start < 0 or epoch < 0 or (seed is not None and seed < 0):
        raise DataError(f"start={start}, epoch={epoch}, seed={seed}: none may be negative")
    order = torch.arange(len(dataset))
    if seed is not None:
        order = torch.randperm(len(dataset), generator=_generator(seed, epoch, _SHUFFLE))
    if drop_last:
        order = order[: len(order) // batch_size * batch_size]
    rank, ranks = share
    if len(order) < ranks and ranks > 1:
        raise DataError(f"{len(order)} images are too few for {ranks} processes")
    keys = (epoch * len(dataset) + order[start * batch_size :]).split(max(batch_size, ranks))
    if len(keys) > 1 and len(keys[-1]) < ranks:
        keys = (*keys[:-2], torch.cat(keys[-2:]))
    loader = DataLoader(
        _WholeBatches(dataset),
        batch_size=None,  # a key of the data set is a whole batch already
        sampler=[part[rank::ranks].tolist() for part in keys if len(part)],
        num_workers=workers,
        multiprocessing_context=_START if workers else None,
        collate_fn=_as_it_is,
        pin_memory=torch.device(device).type == "cuda",
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # else each pass draws a number from the global state
    )
    return _Batches(loader)


# Forked workers start at once, and notice when this process dies; those of a fork server, which a
# newer Python would use, wait for ever. Elsewhere than on Linux forking is not safe.
_START = "fork" if sys.platform == "linux" else None
_TO_STOP = {signal.SIGINT, signal.SIGTERM}


class _WholeBatches(Dataset):
    """A data set whose keys are lists of keys, and whose items are batches, or why there is none.

    A DataLoader would raise an error of a worker with the worker's traceback in its message; as an
    item it arrives as it was.
    """

    def __init__(self, dataset: ImageSet):
        self._dataset = dataset

    def __getitem__(self, keys: list[int]) -> tuple[torch.Tensor, torch.Tensor] | AmpLabError:
        try:
            return self._dataset.batch(keys)
        except AmpLabError as error:
            return error


class _Batches:
    """What `batches` returns: may be iterated over more than once."""

    def __init__(self, loader: DataLoader):
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with _signals_held():
            iterator = iter(self._loader)
        # Workers ignore SIGTERM, so torch and Python could not end them as they do by default when
        # a pass is left unfinished. Hence the call here, and at exit for a pass still going on.
        stop = iterator._shutdown_workers if self._loader.num_workers else _do_nothing
        atexit.register(stop)
        try:
            for item in iterator:
                if isinstance(item, AmpLabError):
                    raise item
                images, targets = item
                yield images, targets
        finally:
            atexit.unregister(stop)
            stop()


def _do_nothing() -> None:
    pass


def _as_it_is(batch: object) -> object:
    return batch


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold the signals to stop back while workers start, until each has set what it does on one."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(_: int) -> None:
    """Let the main process alone decide when to stop: Ctrl-C goes to its workers as well."""
    for number in _TO_STOP:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_STOP)
