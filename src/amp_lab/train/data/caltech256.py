"""Caltech-256: 29,780 photographs of many sizes, in a folder for each class."""

import csv
import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from amp_lab.core.errors import DataError, first_line
from amp_lab.core.files import open_regular
from amp_lab.core.report import listed
from amp_lab.train.data import images
from amp_lab.train.data.downloads import fetch
from amp_lab.train.data.samples import DataSplits, LoadOptions

URL = "https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar"
MD5 = "67b4f42ca05d46448c6bb8ecd2220f6d"
FOLDER = "256_ObjectCategories"
_SUFFIXES = (".jpg", ".jpeg", ".png")


def load(options: LoadOptions) -> DataSplits:
    """Load the photographs, or a stand-in for them; every tenth is a test image.

    `find_folder` finds them in `options.folder`. If the photographs are missing, they are
    downloaded. The first use decodes every file and writes caltech256.csv, a list of the undamaged
    files, so later uses do not decode every file.
    """
    root = find_folder(options.folder)
    if root is None:
        root = options.folder / FOLDER
        fetch("caltech256", URL, MD5, root, may_download=options.download)
    class_folders, targets_of = _scan(root)
    paths, damaged = _readable_images(root, targets_of, skip_damaged=options.skip_damaged)
    targets = np.array([targets_of[path] for path in paths])
    all_train, all_test = images.split(targets, every=10)
    train, test = images.shorten(all_train, all_test, targets, options.limit)
    classes = [name.partition(".")[2] for name in class_folders]  # ak47 of 001.ak47
    marker = root / images.MARKER
    splits = images.photographs(
        "caltech256", root.parent, paths, targets, classes, (train, test), options
    )
    return replace(splits, stand_in=marker.exists(), skipped=tuple(damaged))


def find_folder(folder: Path) -> Path | None:
    """Find the folder 256_ObjectCategories: `folder` or a folder in it; None if it is missing."""
    folder_itself = folder.absolute()
    candidates = [folder / FOLDER, folder / "caltech256" / FOLDER]  # torchvision uses the second
    if folder_itself.name == FOLDER:
        candidates = [folder_itself]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    return None


def _scan(root: Path) -> tuple[list[str], dict[str, int]]:
    """Names of the class folders, sorted, and the target of each image by its path.

    A path begins with the name of `root`: 256_ObjectCategories/001.ak47/001_0001.jpg. Raises
    `DataError` if there are no such folders or no images.
    """
    class_folders: list[str] = []
    for path in root.glob("[0-9][0-9][0-9]*"):
        is_clutter = path.suffix == ".clutter"  # 257.clutter: pictures of no class
        if path.is_dir() and not is_clutter:
            class_folders.append(path.name)
    class_folders.sort()
    if not class_folders:
        raise DataError(f"{root} contains no folder like 001.ak47; {images.remedy(root)}")
    targets_of = {}
    for target, name in enumerate(class_folders):
        # Sorted, since the order of a folder's entries depends on the file system.
        for file in sorted(os.listdir(root / name)):
            if file.lower().endswith(_SUFFIXES):
                path_from_parent = f"{root.name}/{name}/{file}"
                targets_of[path_from_parent] = target
    if not targets_of:
        raise DataError(f"{root} contains no images; {images.remedy(root)}")
    return class_folders, targets_of


def _readable_images(
    root: Path, targets_of: dict[str, int], *, skip_damaged: bool
) -> tuple[list[str], list[str]]:
    """Paths of the images that can be decoded, and of the damaged ones.

    The table caltech256.csv beside `root` lists the images that were decoded before, so only the
    others are decoded here. Without a table, all images are decoded and a table is written.
    Raises `DataError` if an image is damaged, unless `skip_damaged`; if fewer than 10 images can be
    decoded; and if a table lacks an image that is not damaged, since the table may be an old one.
    """
    parent = root.parent
    table = parent / "caltech256.csv"
    in_table = _read_table(table, targets_of)
    unchecked = sorted(targets_of.keys() - in_table)
    damaged = images.find_damaged(parent, unchecked)
    readable = [path for path in targets_of if path not in damaged]
    if damaged and not skip_damaged:
        raise images.damaged_error(damaged, len(targets_of), parent)
    if len(readable) < 10:  # one in ten is a test image, and the evaluation needs at least one
        raise DataError(
            f"{root} contains {len(readable)} readable images; the data set needs at least 10"
        )
    not_in_table = [path for path in readable if path not in in_table]
    if not in_table:
        _write_table(table, readable, targets_of)
    elif not_in_table:
        examples = listed(not_in_table, 3)
        raise DataError(f"{table} lacks {examples}; delete the file, and a new one is written")
    return readable, damaged


def _read_table(table: Path, targets_of: dict[str, int]) -> set[str]:
    """The paths in the table of images (CSV, columns path and target); empty without a table.

    Raises `DataError` if the table cannot be read, or does not agree with `targets_of`.
    """
    if not table.exists():
        return set()
    remedy = "correct it, or delete the file, and a new one is written"
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
    """The table of images is wrong; the message names the line and the fault."""


def _read_rows(rows: csv.DictReader, targets_of: dict[str, int]) -> set[str]:
    """The paths in the rows. Raises `_TableError` for the first row that is wrong."""
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


def _fault(row: dict[str, str], targets_of: dict[str, int], earlier: set[str]) -> str | None:
    """What is wrong with a row of the table, or None; `earlier` has the paths of the rows above."""
    path = row["path"]
    target = row["target"]
    if path not in targets_of:
        return f"there is no image {path!r}"
    expected = targets_of[path]
    if target != str(expected):
        return f"target {target!r} should be {expected}, the number of the folder"
    if path in earlier:
        return f"{path} is listed twice"
    return None


def _write_table(table: Path, paths: list[str], targets_of: dict[str, int]) -> None:
    """Write the table of images, with a row for each of `paths`, atomically.

    Raises `DataError` if that fails.
    """
    # All processes of a distributed run may write the table at once, each into its own draft.
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
            f"{table} cannot be written: {first_line(error)}; if the folder is read-only, link "
            f"{FOLDER} into a folder where you can write"
        ) from error
