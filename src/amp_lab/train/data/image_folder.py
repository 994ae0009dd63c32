"""Your own images, in a folder for each class, as torchvision's `ImageFolder` takes them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from amp_lab.core.errors import DataError
from amp_lab.train.data import images
from amp_lab.train.data.samples import DataSplits, LoadOptions

_TRAIN = "train"
_TEST_NAMES = ("val", "test")  # in order of preference
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
# Images that cannot be decoded here: an error, since skipping them would go unnoticed.
_UNSUPPORTED = (".avif", ".gif", ".heic", ".heif", ".jp2", ".jxl", ".svg")
_TEST_EVERY = 10


@dataclass(frozen=True)
class _File:
    """An image file, which may be damaged."""

    path: str  # relative to the folder of the data set
    target: int
    is_test: bool


@dataclass(frozen=True)
class _Layout:
    """The folders of a data set."""

    root: Path  # the folder of the data set
    train: Path  # `root`, or the folder train in it
    test: Path | None  # None: some of the images in `train` are held out for the test
    classes: list[str]  # the names of the folders in `train`


def load(options: LoadOptions) -> DataSplits:
    """Load the images in `options.folder`.

    The folder has a folder for each class, or two folders called train and val (or test) that
    contain the folders of the classes. Without val or test, a tenth of each class is held out for
    the test, always the same images. All images are decoded once at the beginning.
    """
    layout = _find_layout(options.folder.absolute())
    files = _list_images(layout, layout.train)
    if layout.test is not None:
        files += _list_images(layout, layout.test)
    damaged: set[str] = set()
    if options.skip_damaged:
        damaged = _find_damaged(layout, files)
        files = [file for file in files if file.path not in damaged]
    targets = np.array([file.target for file in files], dtype=np.int64)
    all_train, all_test = _split(layout, files, targets)
    train, test = images.shorten(all_train, all_test, targets, options.limit)
    if not options.skip_damaged:
        # Only now, so that images beyond the limit need not be decoded.
        _require_undamaged(layout, [files[i] for i in (*train, *test)])
    paths = [file.path for file in files]
    splits = images.photographs(
        "folder", layout.root, paths, targets, layout.classes, (train, test), options
    )
    return replace(splits, skipped=tuple(sorted(damaged)))


def _find_layout(root: Path) -> _Layout:
    """Find the folders of a data set; raises `DataError` if they are not as `load` says."""
    if not root.exists():
        raise DataError(f"{root}: no such folder")
    if not root.is_dir():
        raise DataError(f"{root} is a file; give a folder that contains a folder for each class")
    test = _find_test_folder(root)
    train = root
    if test is not None:
        train = root / _TRAIN
    classes = _class_names(train)
    if len(classes) == 1:
        raise DataError(
            f"{train} contains only one class, {classes[0]}; give a folder with two or more"
        )
    if test is not None:
        for name in _class_names(test):
            if name not in classes:
                raise DataError(f"{test / name}: there is no class of this name in {train}")
    return _Layout(root, train, test, classes)


def _split(
    layout: _Layout, files: list[_File], targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Indices in `files` of training and test images; without a test folder, see `_hold_out`.

    Raises `DataError` where there are too few.
    """
    if layout.test is None:
        _require_enough(layout.train, layout.classes, targets)
        return _hold_out(targets)
    is_test = np.array([file.is_test for file in files], dtype=bool)
    if is_test.all():
        raise DataError(f"{layout.train}: no image can be read")
    if not is_test.any():
        raise DataError(f"{layout.test}: no image can be read")
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _find_test_folder(root: Path) -> Path | None:
    """The folder of test images, if the data set is split into train and test; else None.

    Raises `DataError` if it has train, but neither val nor test.
    """
    train = root / _TRAIN
    # A folder train without folders in it is a class of that name.
    if not train.is_dir() or not _folders_in(train):
        return None
    for name in _TEST_NAMES:
        if (root / name).is_dir():
            return root / name
    missing = " nor ".join(_TEST_NAMES)
    raise DataError(
        f"{root} contains {_TRAIN}, but neither {missing}; with --data {train}, a share of the "
        "images is held out for the test"
    )


def _folders_in(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    names = sorted(os.listdir(folder))
    return [name for name in names if not name.startswith(".") and (folder / name).is_dir()]


def _class_names(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted. Raises `DataError` if there are none."""
    names = _folders_in(folder)
    if not names:
        raise DataError(f"{folder} contains no folders; put the images of each class into a folder")
    return names


def _list_images(layout: _Layout, parent: Path) -> list[_File]:
    """The images of all classes in `parent`, which is `layout.train` or `layout.test`.

    Raises `DataError` for a class folder without images.
    """
    is_test = parent == layout.test
    files: list[_File] = []
    for target, name in enumerate(layout.classes):
        folder = parent / name
        if is_test and not folder.is_dir():  # a class may have no test images
            continue
        paths = [path for path in _files_below(folder) if _is_image(path)]
        if not paths:
            endings = ", ".join(_SUFFIXES)
            raise DataError(f"{folder} contains no image that ends in {endings}")
        for path in paths:
            relative_path = os.path.relpath(path, layout.root)
            files.append(_File(relative_path, target, is_test))
    return files


def _files_below(folder: Path) -> Iterator[str]:
    """The paths of all files below a folder, sorted by name, without hidden ones."""
    visited: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        status = os.stat(parent)
        identity = (status.st_dev, status.st_ino)
        if identity in visited:  # a symbolic link leads back here: do not follow it for ever
            folders.clear()
            continue
        visited.add(identity)
        # In place: `os.walk` goes on with the folders that are left in this list.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield os.path.join(parent, name)


def _raise(error: OSError) -> None:
    """Raise the error; `os.walk` would skip a folder that it cannot read."""
    raise error


def _is_image(path: str) -> bool:
    """Whether the file's suffix is that of an image; `DataError` for an unsupported kind."""
    _, suffix = os.path.splitext(path)
    suffix = suffix.lower()
    if suffix in _UNSUPPORTED:
        raise DataError(
            f"{path}: {suffix} images are not supported; convert the file to JPEG or PNG, or "
            "remove it from the folder"
        )
    return suffix in _SUFFIXES


def _require_enough(folder: Path, classes: list[str], targets: np.ndarray) -> None:
    """Raise `DataError` for a class with fewer than two images: one for training, one for test."""
    counts = np.bincount(targets, minlength=len(classes))
    for name, count in zip(classes, counts, strict=True):
        if count < 2:
            images_text = "0 images"
            if count == 1:
                images_text = "1 image"
            raise DataError(
                f"{folder / name}: {images_text} that can be read; a class needs 2, because one "
                "becomes a test image"
            )


def _hold_out(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and test images, with one in ten of each class (at least 1) for the test.

    The choice does not depend on the seed of a run, so that runs are compared on the same images.
    """
    rng = np.random.default_rng(0)
    is_test = np.zeros(len(targets), dtype=bool)
    last = int(targets.max())
    for target in range(last + 1):
        indices = np.flatnonzero(targets == target)
        indices = rng.permutation(indices)
        count = max(1, len(indices) // _TEST_EVERY)
        is_test[indices[:count]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _find_damaged(layout: _Layout, files: list[_File]) -> set[str]:
    """The paths of the images among `files` that cannot be decoded."""
    paths = [file.path for file in files]
    return set(images.find_damaged(layout.root, paths))


def _require_undamaged(layout: _Layout, files: list[_File]) -> None:
    """Raise `DataError` if any of these images cannot be decoded."""
    damaged = _find_damaged(layout, files)
    if damaged:
        raise images.damaged_error(sorted(damaged), len(files), layout.root)
