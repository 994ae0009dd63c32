"""Data sets for training: read from their real files, split, augmented, and served in batches."""

from importlib import import_module
from pathlib import Path

from amp_lab.core.errors import DataError, first_line
from amp_lab.core.requirements import needed_for
from amp_lab.train.registry import DATASETS

with needed_for("loading data"):
    from amp_lab.train.data.batches import batches
    from amp_lab.train.data.samples import DataSplits, LoadOptions, SampleSet
    from amp_lab.train.data.text_download import load_downloaded_text

    # All are imported at once, and torchvision with them: its libraries cannot be loaded after
    # TensorFlow's, which notebook 12 needs.
    _MODULES = {name: import_module(f"{__name__}.{row.module}") for name, row in DATASETS.items()}

__all__ = ["DATASETS", "DataSplits", "LoadOptions", "SampleSet", "batches", "load", "load_dataset"]

_MAX_IMAGE_SIZE = 1024


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
) -> DataSplits:
    """Load a data set, and download it if it is missing.

    Args:
        name: A key of `DATASETS`, such as "digits" or "text".
        folder: Path of the folder with the data files. The module of the data set in `train/data/`
            describes them.
        image_size: Height and width of the images in pixels. None is the default of the data set.
        limit: The largest number of training samples; None is all. The same share of test samples
            is used. The shares of the classes stay the same.
        seed: The seed of the augmentation and of the positions where passages of a text begin; 0 or
            more.
        augment: Whether training images are augmented, and whether passages begin at random
            positions.
        skip_damaged: Whether to leave out image files that cannot be decoded. `skipped` lists them.
        download: Whether to download missing files. If false, a missing file is an error.

    Returns:
        A `DataSplits`. The items of `train` and `test` are pairs of a sample and a target: for
        images, a float32 tensor (3, S, S) and an int; for a text, a passage of 256 characters,
        int64 (256,), and the next characters, int64 (256,).

    Raises:
        DataError: If a value is wrong, or if files are missing, damaged or altered.

    Example:
        data = load_dataset("digits", limit=100)
        image, target = data.train[0]
        print(data.summary, image.shape, target)
    """
    _require_known(name)
    row = DATASETS[name]
    if row.is_text and image_size is not None:
        raise DataError(f"{name} is a text and has no image size: leave out image_size")
    if image_size is None:
        image_size = row.image_size
    if seed < 0:
        raise DataError(f"seed={seed} must not be negative")
    options = LoadOptions(
        folder=Path(folder),
        limit=limit,
        seed=seed if augment else None,
        image_size=image_size,
        skip_damaged=skip_damaged,
        download=download,
    )
    return load(name, options)


def load(name: str, options: LoadOptions) -> DataSplits:
    """Load the data set `name`, one of `DATASETS`, with more options than `load_dataset` takes.

    Raises `DataError` for a wrong option, and for files that are missing, damaged or altered.
    """
    _require_known(name)
    with_files = [known for known, row in DATASETS.items() if row.has_image_files]
    if options.skip_damaged and name not in with_files:
        names = " and ".join(with_files)
        raise DataError(
            f"skip damaged is only for data sets with image files ({names}), not for {name}"
        )
    size = options.image_size
    if not 1 <= size <= _MAX_IMAGE_SIZE:
        raise DataError(f"image_size={size} must be between 1 and {_MAX_IMAGE_SIZE} pixels")
    limit = options.limit
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit} must be at least 1, or None for all samples")
    row = DATASETS[name]
    try:
        if row.url:
            return load_downloaded_text(name, row.url, row.checksum, options)
        return _MODULES[name].load(options)
    except OSError as error:  # a folder that may not be read, a disk that fails
        raise DataError(f"{name} cannot be read: {first_line(error)}") from error


def _require_known(name: str) -> None:
    """Raise `DataError` unless there is a data set of this name."""
    if name not in DATASETS:
        raise DataError(f"unknown data set {name!r}: use one of {', '.join(DATASETS)}")
