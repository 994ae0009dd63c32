"""Your own images, in a folder for each class, as torchvision's `ImageFolder` takes them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from amp_lab.core.errors import DataError
from amp_lab.train.data import images

_TRAIN = "train"
_TESTS = ("val", "test")  # the first of them that is there
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
# Other images, which would be missing without a word.
_UNREAD = (".avif", ".gif", ".heic", ".heif", ".jp2", ".jxl", ".svg")
_TEST_EVERY = 10


@dataclass(frozen=True)
class _File:
    """An image, before it is known whether it can be read."""

    path: str  # relative to the folder of the data set
    target: int
    is_test: bool


@dataclass(frozen=True)
class _Layout:
    """Which folders have what."""

    place: Path  # the folder of the data set
    train: Path  # `place`, or the folder train in it
    test: Path | None  # None: a share of the images in `train`
    classes: list[str]


def load(options: images.LoadOptions) -> images.ImageData:
    """The images in `options.folder`. See `load_dataset`."""
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
        _require_sound(layout, [files[i] for i in (*train, *test)])
    return _made(options, layout, files, (train, test), damaged)


def _made(
    options: images.LoadOptions,
    layout: _Layout,
    files: list[_File],
    split: tuple[np.ndarray, np.ndarray],
    damaged: set[str],
) -> images.ImageData:
    """The data set of these images, of which `split` has the indices of training and test."""
    train, test = split
    targets = np.array([file.target for file in files], dtype=np.int64)
    paths = np.array([layout.place / file.path for file in files])
    train_paths = paths[train].tolist()
    test_paths = paths[test].tolist()
    size = options.image_size or images.PHOTOGRAPH_SIZE
    mean_std = images.IMAGENET_MEAN_STD
    names = "\n".join(Path(file.path).as_posix() for file in files)
    content = os.fsencode(names)
    return images.ImageData(
        name="folder",
        train=images.ImagesOnDisk(
            train_paths, targets[train], size, mean_std, options.seed, images.jitter
        ),
        test=images.ImagesOnDisk(test_paths, targets[test], size, mean_std),
        classes=tuple(layout.classes),
        image_size=size,
        fingerprint=images.fingerprint(content, targets, train, test),
        skipped=tuple(sorted(damaged)),
    )


def _find_layout(place: Path) -> _Layout:
    """The folders in the folder of a data set; raises `DataError` if that has no classes."""
    if not place.exists():
        raise DataError(f"{place}: no such folder")
    if not place.is_dir():
        raise DataError(f"{place}: is a file; give the folder that has a folder for each class")
    test = _find_test_part(place)
    train = place
    if test is not None:
        train = place / _TRAIN
    classes = _class_names(train)
    if len(classes) == 1:
        raise DataError(
            f"{train}: one class alone, {classes[0]}; give a folder with two classes or more"
        )
    if test is not None:
        for name in _class_names(test):
            if name not in classes:
                raise DataError(f"{test / name}: a class that {train} has not")
    return _Layout(place, train, test, classes)


def _split(
    layout: _Layout, files: list[_File], targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and test images; raises `DataError` where there are too few."""
    if layout.test is None:
        _require_enough(layout.train, layout.classes, targets)
        return _hold_out(targets)
    is_test = np.array([file.is_test for file in files], dtype=bool)
    if is_test.all():
        raise DataError(f"{layout.train}: 0 images that can be read")
    if not is_test.any():
        raise DataError(f"{layout.test}: 0 images that can be read")
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _find_test_part(place: Path) -> Path | None:
    """The folder of test images beside the one called train; None for class folders alone."""
    train = place / _TRAIN
    if not train.is_dir() or not _folders_in(train):  # then train is a class
        return None
    for name in _TESTS:
        if (place / name).is_dir():
            return place / name
    wanted = " nor ".join(_TESTS)
    raise DataError(
        f"{place}: has {_TRAIN}, and neither {wanted} beside it; give --data {train} to have a "
        f"share of its images held out for the test"
    )


def _folders_in(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted; not the hidden ones."""
    names = sorted(os.listdir(folder))
    return [name for name in names if not name.startswith(".") and (folder / name).is_dir()]


def _class_names(folder: Path) -> list[str]:
    """The names of the classes that have a folder in this one, sorted."""
    names = _folders_in(folder)
    if not names:
        raise DataError(
            f"{folder}: no folders of classes there; give each class a folder with its images"
        )
    return names


def _list_images(layout: _Layout, part: Path) -> list[_File]:
    """The images of all classes in the folder `part`, that of training or that of test images."""
    is_test = part == layout.test
    files: list[_File] = []
    for target, name in enumerate(layout.classes):
        folder = part / name
        if is_test and not folder.is_dir():  # no test image of this class
            continue
        paths = [path for path in _files_below(folder) if _is_image(path)]
        if not paths:
            endings = ", ".join(_SUFFIXES)
            raise DataError(f"{folder}: no image there ends in {endings}")
        for path in paths:
            relative_path = os.path.relpath(path, layout.place)
            files.append(_File(relative_path, target, is_test))
    return files


def _files_below(folder: Path) -> Iterator[str]:
    """The paths of all files in a folder and the folders in it, in an order that stays the same."""
    been_there: set[tuple[int, int]] = set()
    for where, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        status = os.stat(where)
        identity = (status.st_dev, status.st_ino)
        if identity in been_there:  # a link leads back to it
            folders.clear()
            continue
        been_there.add(identity)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield os.path.join(where, name)


def _raise(error: OSError) -> None:
    raise error


def _is_image(path: str) -> bool:
    """Whether a file is taken for an image; raises `DataError` for one of a kind not read here."""
    _, suffix = os.path.splitext(path)
    suffix = suffix.lower()
    if suffix in _UNREAD:
        raise DataError(
            f"{path}: images that end in {suffix} are not read; convert it to JPEG or PNG, or take "
            "it out of the folder"
        )
    return suffix in _SUFFIXES


def _require_enough(folder: Path, classes: list[str], targets: np.ndarray) -> None:
    """Raise `DataError` for a class without an image to train with and one to test with."""
    counts = np.bincount(targets, minlength=len(classes))
    for name, count in zip(classes, counts, strict=True):
        if count < 2:
            images_text = "0 images"
            if count == 1:
                images_text = "1 image"
            raise DataError(
                f"{folder / name}: {images_text} that can be read; it takes 2, for one of them is "
                "kept for the test"
            )


def _hold_out(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and test images: of each class one in ten, and one at least.

    Which ones does not depend on the seed of a run, so that runs are compared on the same images.
    """
    rng = np.random.default_rng(0)
    is_test = np.zeros(len(targets), dtype=bool)
    last = int(targets.max())
    for target in range(last + 1):
        of_class = np.flatnonzero(targets == target)
        of_class = rng.permutation(of_class)
        count = max(1, len(of_class) // _TEST_EVERY)
        is_test[of_class[:count]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _find_damaged(layout: _Layout, files: list[_File]) -> set[str]:
    """The paths of those of these images that cannot be decoded."""
    paths = [file.path for file in files]
    return set(images.find_damaged(layout.place, paths))


def _require_sound(layout: _Layout, files: list[_File]) -> None:
    """Raise `DataError` if any of these images cannot be decoded."""
    damaged = _find_damaged(layout, files)
    if damaged:
        raise images.damaged_error(sorted(damaged), len(files), layout.place)
