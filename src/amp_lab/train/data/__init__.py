"""Data sets for training: read from their real files, split, augmented, and served in batches."""

from pathlib import Path

from amp_lab.core.errors import DataError, first_line
from amp_lab.core.requirements import needed_for

with needed_for("loading data"):
    from amp_lab.train.data import caltech256, cifar10, digits, image_folder
    from amp_lab.train.data.batches import batches
    from amp_lab.train.data.images import ImageData, ImageSet, LoadOptions
    from amp_lab.train.data.text import TEXTS, load_text

__all__ = [
    "COME_WITH_LIBRARIES",
    "DATASETS",
    "TEXTS",
    "USERS_OWN",
    "ImageData",
    "ImageSet",
    "batches",
    "load_dataset",
    "load_text",
]

# The registry. To add a data set, write a file beside this one with a `load` from `LoadOptions` to
# `ImageData`, and add a line here. All are imported at once, and torchvision with them: its
# libraries cannot be loaded after TensorFlow's, which notebook 12 needs.
_LOADERS = {
    "digits": digits.load,
    "cifar10": cifar10.load,
    "caltech256": caltech256.load,
    "folder": image_folder.load,
}
DATASETS = (*_LOADERS, *TEXTS)
COME_WITH_LIBRARIES = ("digits", "stdlib")
"""Data sets that need no folder."""
USERS_OWN = ("folder", "text")
"""Data sets of the user's own files: they have no default folder and cannot be downloaded."""
_MAX_IMAGE_SIZE = 1024
_WITH_IMAGE_FILES = ("caltech256", "folder")  # one file for each image, which may be damaged


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
    """Load the data set `name`, one of `DATASETS`, from `folder`; download it there if missing.

    - ``digits``: scikit-learn's 1,797 handwritten digits, which need no folder and no network. One
      in five is a test image.
    - ``cifar10``: 50,000 and 10,000 photographs in `folder`/cifar-10-batches-py.
    - ``caltech256``: 29,780 photographs in `folder`/256_ObjectCategories or
      `folder`/caltech256/256_ObjectCategories; `folder` may also be that folder itself. Every tenth
      is a test image. The first use decodes every file and writes caltech256.csv, a list of those
      that are not damaged, so that later uses need not.

    - ``folder``: your own images; `folder` has a folder for each class, or two called train and val
      (or test) that have these. Without a val or test, a tenth of each class is held out for the
      test, always the same. All images are decoded once, before anything else.

    - ``stdlib`` and ``text``: see `load_text`.

    Images have `image_size` pixels a side (default: 32; for caltech256 and folder, 224). `limit`
    keeps at most so many training images, and the same share of the test images, rounded up. Each
    class keeps its share, and which images are kept is always the same. `seed` is for the
    augmentation of the training images, which `augment=False` switches off. `skip_damaged` leaves
    out images of caltech256 and folder that cannot be decoded, and lists them in `skipped`.
    With `download=False`, missing files are an error.

    Raises `DataError` for a wrong value, and for files that are missing, damaged or altered.
    """
    if name not in DATASETS:
        raise DataError(f"there is no data set {name!r}; use {', '.join(DATASETS)}")
    if skip_damaged and name not in _WITH_IMAGE_FILES:
        names = " and ".join(_WITH_IMAGE_FILES)
        raise DataError(f"skip damaged is for {names}, whose images are files, not for {name}")
    if name in TEXTS and image_size is not None:
        raise DataError(f"{name} is a text, and has no image_size")
    if name in TEXTS:
        return load_text(name, folder, limit=limit, seed=seed if augment else None)
    if image_size is not None and not 1 <= image_size <= _MAX_IMAGE_SIZE:
        raise DataError(f"image_size={image_size} must be between 1 and {_MAX_IMAGE_SIZE} pixels")
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit} must be at least 1, or None for all images")
    if seed < 0:
        raise DataError(f"seed={seed} must not be negative")
    options = LoadOptions(
        folder=Path(folder),
        image_size=image_size,
        limit=limit,
        seed=seed if augment else None,
        skip_damaged=skip_damaged,
        download=download,
    )
    try:
        return _LOADERS[name](options)
    except OSError as error:  # a folder that may not be read, a disk that fails
        raise DataError(f"{name} cannot be read: {first_line(error)}") from error
