"""Caltech-256: 29,780 photographs of many sizes, in a folder for each class."""

import csv
import io
import os
from pathlib import Path

import numpy as np

from amp_lab.core.errors import DataError, first_line
from amp_lab.core.files import open_regular
from amp_lab.core.report import listed
from amp_lab.train.data import images
from amp_lab.train.data.downloads import fetch

URL = "https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar"
MD5 = "67b4f42ca05d46448c6bb8ecd2220f6d"
FOLDER = "256_ObjectCategories"
_SUFFIXES = (".jpg", ".jpeg", ".png")


def load(options: images.LoadOptions) -> images.ImageData:
    """The real ones or a stand-in; every tenth is a test image. See `load_dataset`."""
    place = find_folder(options.folder)
    if place is None:
        place = options.folder / FOLDER
        fetch("caltech256", URL, MD5, place, options.download)
    classes, targets_of = _scan(place)
    paths, skipped = _readable_images(place, targets_of, options.skip_damaged)
    targets = np.array([targets_of[path] for path in paths])
    all_train, all_test = images.split(targets, every=10)
    train, test = images.shorten(all_train, all_test, targets, options.limit)
    files = np.array([place.parent / path for path in paths])
    train_files = files[train].tolist()
    test_files = files[test].tolist()
    size = options.image_size or images.PHOTOGRAPH_SIZE
    mean_std = images.IMAGENET_MEAN_STD
    marker = place / images.MARKER
    content = "\n".join(paths)
    return images.ImageData(
        name="caltech256",
        train=images.ImagesOnDisk(
            train_files, targets[train], size, mean_std, options.seed, images.jitter
        ),
        test=images.ImagesOnDisk(test_files, targets[test], size, mean_std),
        classes=tuple(name.partition(".")[2] for name in classes),  # 001.ak47
        image_size=size,
        stand_in=marker.exists(),
        fingerprint=images.fingerprint(content.encode(), targets, train, test),
        skipped=tuple(skipped),
    )


def find_folder(folder: Path) -> Path | None:
    """The folder 256_ObjectCategories: `folder` itself, in it, or where torchvision puts it."""
    folder_itself = folder.absolute()
    places = [folder / FOLDER, folder / "caltech256" / FOLDER]
    if folder_itself.name == FOLDER:
        places = [folder_itself]
    for place in places:
        if place.is_dir():
            return place
    return None


def _scan(place: Path) -> tuple[list[str], dict[str, int]]:
    """Names of the class folders, and the target of each image by its path from above `place`."""
    classes: list[str] = []
    for path in place.glob("[0-9][0-9][0-9]*"):
        is_clutter = path.suffix == ".clutter"  # which is no class
        if path.is_dir() and not is_clutter:
            classes.append(path.name)
    classes.sort()
    if not classes:
        raise DataError(f"{place} holds no folder like 001.ak47; {images.remedy(place)}")
    targets_of = {}
    for target, name in enumerate(classes):
        # Sorted, since the order of a folder's entries depends on the file system.
        for file in sorted(os.listdir(place / name)):
            if file.lower().endswith(_SUFFIXES):
                path_from_above = f"{place.name}/{name}/{file}"
                targets_of[path_from_above] = target
    if not targets_of:
        raise DataError(f"{place} holds no images; {images.remedy(place)}")
    return classes, targets_of


def _readable_images(
    place: Path, targets_of: dict[str, int], skip_damaged: bool
) -> tuple[list[str], list[str]]:
    """Paths of the images that can be decoded, and of those that cannot.

    Reads caltech256.csv beside `place`, or decodes every image and then writes it. Images that the
    list lacks are decoded each time: it never lacks a good one unnoticed.
    """
    parent = place.parent
    table = parent / "caltech256.csv"
    in_table = _read_table(table, targets_of)
    unchecked = sorted(targets_of.keys() - in_table)
    damaged = images.find_damaged(parent, unchecked)
    good = [path for path in targets_of if path not in damaged]
    if damaged and not skip_damaged:
        raise images.damaged_error(damaged, len(targets_of), parent)
    if len(good) < 10:  # one in ten is a test image, and without one nothing can be evaluated
        raise DataError(f"{place} has {len(good)} images that can be read; it takes at least 10")
    lacking = [path for path in good if path not in in_table]
    if not in_table:
        _write_table(table, good, targets_of)
    elif lacking:
        examples = listed(lacking, 3)
        raise DataError(f"{table} lacks {examples}; delete it to have it made again")
    return good, damaged


def _read_table(table: Path, targets_of: dict[str, int]) -> set[str]:
    """The paths in the list of images, which has the targets that their folders give; or none."""
    if not table.exists():
        return set()
    remedy = "correct it, or delete the file to have it made again"
    try:
        with open_regular(table) as content, io.TextIOWrapper(content, "utf-8", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            paths = _read_rows(rows, targets_of)
    except _TableError as error:
        raise DataError(f"{table}, {error}; {remedy}") from None
    except (OSError, UnicodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read: {first_line(error)}; {remedy}") from error
    if not paths:
        raise DataError(f"{table} lists no images; {remedy}")
    return paths


class _TableError(Exception):
    """What is wrong with the list, and in which line."""


def _read_rows(rows: csv.DictReader, targets_of: dict[str, int]) -> set[str]:
    """The paths in the rows. Raises `_TableError` for the first that does not fit the folders."""
    columns = rows.fieldnames or []
    for column in ("path", "target"):
        if column not in columns:
            raise _TableError(f"line 1: no column {column!r}")
    paths: set[str] = set()
    for row in rows:
        fault = _fault(row, targets_of, paths)
        if fault:
            raise _TableError(f"line {rows.line_num}: {fault}")
        paths.add(row["path"])
    return paths


def _fault(row: dict[str, str], targets_of: dict[str, int], before: set[str]) -> str | None:
    """What is wrong with a row of the list, after rows with the paths `before`."""
    path = row["path"]
    target = row["target"]
    if path not in targets_of:
        return f"no image {path!r} there"
    number = targets_of[path]
    if target != str(number):
        return f"target {target!r} should be {number}, as the folder is numbered"
    if path in before:
        return f"{path} is there twice"
    return None


def _write_table(table: Path, paths: list[str], targets_of: dict[str, int]) -> None:
    # All processes of a distributed run may come here at once, so each writes a file of its own.
    draft_name = f".{table.name}.{os.getpid()}"
    draft = table.with_name(draft_name)
    try:
        with draft.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["path", "target"])
            rows.writerows((path, targets_of[path]) for path in paths)
        draft.replace(table)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise DataError(
            f"{table} cannot be written: {first_line(error)}; if the images lie where you may not "
            f"write, link {FOLDER} into a folder where you may"
        ) from error
