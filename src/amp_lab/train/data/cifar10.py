"""CIFAR-10: 50,000 and 10,000 photographs of 32x32 pixels, in batches that torchvision reads."""

import json
import pickle
from pathlib import Path

import numpy as np
import torch
from torchvision.datasets import CIFAR10

from amp_lab.core.errors import DataError, first_line, with_type
from amp_lab.core.files import read_json
from amp_lab.train.data import images
from amp_lab.train.data.downloads import fetch, md5_of

FOLDER = CIFAR10.base_folder  # cifar-10-batches-py
_META = CIFAR10.meta["filename"]
CHECKSUMS = dict([*CIFAR10.train_list, *CIFAR10.test_list])
CHECKSUMS[_META] = CIFAR10.meta["md5"]
"""MD5 of each file of the real ones."""
_HARMLESS = {  # what an array in a pickle asks for
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
MEAN_STD = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def load(options: images.LoadOptions) -> images.ImageData:
    """The real ones or a stand-in, with the split that they come with. See `load_dataset`."""
    place = options.folder / FOLDER
    if find_folder(options.folder) is None:
        fetch("cifar10", CIFAR10.url, CIFAR10.tgz_md5, place, options.download)
    checksums = CHECKSUMS
    marker = place / images.MARKER
    stand_in = marker.exists()
    if stand_in:  # whose checksums come from the same folder, and prove nothing
        checksums = _read_marker(marker)
        for name, md5 in checksums.items():
            _require_data_only(place / name, md5)
    train, test = _read(options.folder, checksums)
    targets = np.array(train.targets + test.targets)
    indices = np.arange(len(targets))
    of_train, of_test = np.split(indices, [len(train)])
    keep_train, keep_test = images.shorten(of_train, of_test, targets, options.limit)
    keep_test = keep_test - len(train)  # counted from the first test image
    train_pixels, train_targets = _choose(train, keep_train)
    test_pixels, test_targets = _choose(test, keep_test)
    size = options.image_size or 32
    # The checksums stand for the content of all images, which need not be read for them.
    content = json.dumps(checksums)
    return images.ImageData(
        name="cifar10",
        train=images.ImagesInMemory(
            train_pixels, train_targets, size, MEAN_STD, options.seed, _flip_and_shift
        ),
        test=images.ImagesInMemory(test_pixels, test_targets, size, MEAN_STD),
        classes=tuple(train.classes),
        image_size=size,
        stand_in=stand_in,
        fingerprint=images.fingerprint(content.encode(), keep_train, keep_test),
    )


def _choose(part: CIFAR10, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 (N, 3, 32, 32) and targets (N,) of the images with these indices."""
    pixels = part.data.transpose(0, 3, 1, 2)
    targets = np.array(part.targets)
    return pixels[kept], targets[kept]


def find_folder(folder: Path) -> Path | None:
    """The folder of the batches in `folder`, if it is there."""
    place = folder / FOLDER
    if not place.exists():
        return None
    return place


def _read(folder: Path, checksums: dict[str, str]) -> list[CIFAR10]:
    """Training and test images by torchvision's reader, which compares these checksums."""
    attributes = {
        "train_list": [[name, checksums[name]] for name, _ in CIFAR10.train_list],
        "test_list": [[name, checksums[name]] for name, _ in CIFAR10.test_list],
        "meta": CIFAR10.meta | {"md5": checksums[_META]},
    }
    reader = type("Reader", (CIFAR10,), attributes)
    try:
        train = _fitting(reader(folder, train=True))
        test = _fitting(reader(folder, train=False))
        return [train, test]
    except RuntimeError:  # torchvision's, for a wrong checksum; it does not say of which file
        _require_files(folder / FOLDER, checksums)
        raise
    except (EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        place = folder / FOLDER
        problem = f"{place} has other things in its files than images and classes"
        remedy = images.remedy(place)
        raise DataError(f"{problem} ({with_type(error)}); {remedy}") from None


def _require_files(place: Path, checksums: dict[str, str]) -> None:
    """Raise `DataError` for the first file that is missing or has another checksum."""
    remedy = images.remedy(place)
    for name, md5 in checksums.items():
        path = place / name
        if not path.is_file():
            raise DataError(f"{path} is missing; {remedy}") from None
        if md5_of(path) != md5:
            raise DataError(f"{path} is damaged or altered; {remedy}") from None


def _fitting(part: CIFAR10) -> CIFAR10:
    """The same. Raises `ValueError` for images without labels, and labels that are no class."""
    data = part.data
    labels = part.targets
    classes = part.classes
    are_texts = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    if not are_texts:
        raise ValueError("the names of its classes are no list of texts")
    if data.dtype != np.uint8:
        raise ValueError(f"pixels of {data.dtype}")
    if len(data) != len(labels):
        raise ValueError(f"{len(data)} images and {len(labels)} labels")
    for label in labels:
        if not isinstance(label, int) or not 0 <= label < len(classes):
            raise ValueError(f"a label is {label!r}, of {len(classes)} classes")
    return part


class _DataUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists, dicts and arrays, which is all that the batches are made of."""

    def find_class(self, module: str, name: str):
        module_in_numpy_1 = module.replace("._core", ".core")
        if (module_in_numpy_1, name) in _HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _require_data_only(path: Path, md5: str) -> None:
    """Raise `DataError` for a file that would run code when torchvision unpickles it."""
    if not path.is_file() or md5_of(path) != md5:
        return  # `_read` says so
    try:
        with open(path, "rb") as file:
            _DataUnpickler(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise anything
        reason = f"is no batch of CIFAR-10 ({first_line(error)})"
        remedy = images.remedy(path.parent)
        raise DataError(f"{path} {reason}; {remedy}") from None


def _read_marker(marker: Path) -> dict[str, str]:
    """MD5 of each file of a stand-in for CIFAR-10."""
    try:
        checksums = read_json(marker)["md5"]
        return {name: checksums[name] for name in CHECKSUMS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = images.remedy(marker.parent)
        raise DataError(f"{marker} is damaged; {remedy}") from error


def _flip_and_shift(draws: torch.Tensor) -> torch.Tensor:
    """Matrices that mirror half of the images, and shift by up to 4 whole pixels of 32."""
    flip, x, y, _ = draws.unbind(1)
    is_mirrored = flip < 0.5
    flip = 1 - 2 * is_mirrored.float()
    x = _whole_pixels(x) / 16
    y = _whole_pixels(y) / 16
    zero = torch.zeros_like(x)
    one = torch.ones_like(x)
    rows = torch.stack([flip, zero, x, zero, one, y], dim=1)
    return rows.view(-1, 2, 3)


def _whole_pixels(draws: torch.Tensor) -> torch.Tensor:
    """From -4 to 4, by numbers in [0, 1)."""
    from_zero = (9 * draws).floor()
    return from_zero - 4
