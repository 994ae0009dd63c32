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
from amp_lab.train.data.samples import DataSplits, LoadOptions, fingerprint

FOLDER = CIFAR10.base_folder  # cifar-10-batches-py
_META = CIFAR10.meta["filename"]
CHECKSUMS = dict([*CIFAR10.train_list, *CIFAR10.test_list])
CHECKSUMS[_META] = CIFAR10.meta["md5"]
"""The MD5 of each file of the real data set, by file name."""
_ARRAY_GLOBALS = {  # (module, name) that a pickled NumPy array refers to; none runs foreign code
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
MEAN_STD = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # of each channel, in [0, 1]


def load(options: LoadOptions) -> DataSplits:
    """Load the photographs, or a stand-in for them, with their own split into training and test.

    The files are in `options.folder`/cifar-10-batches-py. If they are missing, they are downloaded.
    """
    root = options.folder / FOLDER
    if find_folder(options.folder) is None:
        fetch("cifar10", CIFAR10.url, CIFAR10.tgz_md5, root, may_download=options.download)
    checksums = CHECKSUMS
    marker = root / images.MARKER
    is_stand_in = marker.exists()
    if is_stand_in:
        # Whoever wrote the files wrote these checksums too, so they do not make unpickling safe.
        checksums = _read_marker(marker)
        for name, md5 in checksums.items():
            _require_data_only(root / name, md5)
    train, test = _read(options.folder, checksums)
    targets = np.array(train.targets + test.targets)
    indices = np.arange(len(targets))  # the test images are numbered after the training images
    all_train, all_test = np.split(indices, [len(train)])
    train_indices, test_indices = images.shorten(all_train, all_test, targets, options.limit)
    test_indices = test_indices - len(train)  # counted from the first test image
    train_pixels, train_targets = _select(train, train_indices)
    test_pixels, test_targets = _select(test, test_indices)
    size = options.image_size
    # The fingerprint takes the checksums in place of the pixels: both change together.
    content = json.dumps(checksums)
    return DataSplits(
        name="cifar10",
        train=images.ImagesInMemory(
            train_pixels,
            train_targets,
            size,
            MEAN_STD,
            seed=options.seed,
            augment=_flip_and_shift,
        ),
        test=images.ImagesInMemory(test_pixels, test_targets, size, MEAN_STD),
        classes=tuple(train.classes),
        sample_shape=(3, size, size),
        stand_in=is_stand_in,
        fingerprint=fingerprint(content.encode(), train_indices, test_indices),
    )


def _select(dataset: CIFAR10, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 (N, 3, 32, 32) and targets (N,) of the images with these indices."""
    pixels = dataset.data.transpose(0, 3, 1, 2)  # torchvision has (N, 32, 32, 3)
    targets = np.array(dataset.targets)
    return pixels[indices], targets[indices]


def find_folder(folder: Path) -> Path | None:
    """The folder cifar-10-batches-py in `folder`; None if it is missing."""
    root = folder / FOLDER
    if not root.exists():
        return None
    return root


def _read(folder: Path, checksums: dict[str, str]) -> list[CIFAR10]:
    """Read the images with torchvision's reader; returns [training, test].

    `checksums` has the MD5 of each file by name. Raises `DataError` if a file is missing, has
    another MD5, or holds other things than images and labels.
    """
    # torchvision takes the checksums from attributes of its class, so a subclass has others.
    attributes = {
        "train_list": [[name, checksums[name]] for name, _ in CIFAR10.train_list],
        "test_list": [[name, checksums[name]] for name, _ in CIFAR10.test_list],
        "meta": CIFAR10.meta | {"md5": checksums[_META]},
    }
    reader = type("Reader", (CIFAR10,), attributes)
    try:
        train = reader(folder, train=True)
        _require_valid(train)
        test = reader(folder, train=False)
        _require_valid(test)
        return [train, test]
    except RuntimeError:  # torchvision's, for a wrong checksum; it does not name the file
        _require_files(folder / FOLDER, checksums)
        raise
    except (EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        root = folder / FOLDER
        problem = f"{root} contains files without valid images and classes"
        remedy = images.remedy(root)
        raise DataError(f"{problem} ({with_type(error)}); {remedy}") from None


def _require_files(root: Path, checksums: dict[str, str]) -> None:
    """Raise `DataError` for the first file in `root` that is missing or has another MD5."""
    remedy = images.remedy(root)
    for name, md5 in checksums.items():
        path = root / name
        if not path.is_file():
            raise DataError(f"{path} is missing; {remedy}") from None
        if md5_of(path) != md5:
            raise DataError(f"{path} was damaged or changed; {remedy}") from None


def _require_valid(dataset: CIFAR10) -> None:
    """Raise `ValueError` unless each image has uint8 pixels and an integer label of a class."""
    pixels = dataset.data
    labels = dataset.targets
    classes = dataset.classes
    are_strings = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    if not are_strings:
        raise ValueError("the names of the classes are not a list of strings")
    if pixels.dtype != np.uint8:
        raise ValueError(f"pixels have the dtype {pixels.dtype}")
    if len(pixels) != len(labels):
        raise ValueError(f"{len(pixels)} images have {len(labels)} labels")
    for label in labels:
        if not isinstance(label, int) or not 0 <= label < len(classes):
            raise ValueError(f"a label is {label!r}, but there are {len(classes)} classes")


class _DataUnpickler(pickle.Unpickler):
    """Unpickles plain data and NumPy arrays, and refuses a pickle that would run other code."""

    def find_class(self, module: str, name: str):
        """The class or function that a pickle refers to, if it is in `_ARRAY_GLOBALS`."""
        module_in_numpy_1 = module.replace("._core", ".core")  # NumPy 2 renamed numpy.core
        if (module_in_numpy_1, name) in _ARRAY_GLOBALS:
            return super().find_class(module, name)
        problem = f"it would load {module}.{name}, which CIFAR-10 files do not use"
        raise pickle.UnpicklingError(problem)


def _require_data_only(path: Path, md5: str) -> None:
    """Raise `DataError` if the file would run code when torchvision unpickles it.

    A file that is missing or has another MD5 is left to `_read`, which does not unpickle it.
    """
    if not path.is_file() or md5_of(path) != md5:
        return
    try:
        with open(path, "rb") as file:
            _DataUnpickler(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise anything
        reason = f"is not a batch of CIFAR-10 ({first_line(error)})"
        remedy = images.remedy(path.parent)
        raise DataError(f"{path} {reason}; {remedy}") from None


def _read_marker(marker: Path) -> dict[str, str]:
    """The MD5 of each file of a stand-in for CIFAR-10, by file name, from its marker file.

    Raises `DataError` if that is damaged.
    """
    try:
        checksums = read_json(marker)["md5"]
        return {name: checksums[name] for name in CHECKSUMS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = images.remedy(marker.parent)
        raise DataError(f"{marker} is damaged; {remedy}") from error


def _flip_and_shift(draws: torch.Tensor) -> torch.Tensor:
    """Matrices (B, 2, 3) that mirror half of the images, and shift by up to 4 whole pixels of 32.

    `draws` (B, 4) are random numbers in [0, 1).
    """
    flip, x, y, _ = draws.unbind(1)
    is_mirrored = flip < 0.5
    flip = 1 - 2 * is_mirrored.float()  # the sign of x: -1 mirrors
    x = _whole_pixels(x) / 16  # 32 pixels are 2 units of `grid_sample`
    y = _whole_pixels(y) / 16
    return images.affine(flip, torch.zeros_like(x), torch.ones_like(x), x, y)


def _whole_pixels(draws: torch.Tensor) -> torch.Tensor:
    """Whole numbers from -4 to 4, equally likely, from random numbers in [0, 1)."""
    zero_to_eight = (9 * draws).floor()
    return zero_to_eight - 4
