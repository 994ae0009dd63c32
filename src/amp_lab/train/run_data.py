"""The data of a run: check that the settings match the data, find the data, and load them."""

import os
from pathlib import Path

from amp_lab.core.errors import RunError
from amp_lab.models.gpt import SIZES
from amp_lab.train.data import DataSplits, LoadOptions, load
from amp_lab.train.registry import DATASETS, Source
from amp_lab.train.run_folder import SavedRun
from amp_lab.train.train_options import RunConfig

_DOWNLOAD_FOLDER = "data"
_IMAGE_SETTINGS = ("channels_last", "image_size", "skip_damaged")
_TEXT_SETTINGS = ("context", "tokenizer", "vocabulary")


def require_match(config: RunConfig) -> None:
    """Raise `RunError` if the model or a setting does not match the data set or another setting.

    Text needs a GPT, images a classifier, and some settings are only for one of the two. Called
    before the data are loaded.
    """
    is_text = DATASETS[config.dataset].is_text
    is_gpt = config.model in SIZES
    if is_text and not is_gpt:
        raise RunError(_mismatch(config, "text", models=", ".join(SIZES)))
    if is_gpt and not is_text:
        raise RunError(_mismatch(config, "images", models="a classifier of torchvision"))
    if is_text:
        _require_unset(config, _IMAGE_SETTINGS, data_type="images")
    else:
        _require_unset(config, _TEXT_SETTINGS, data_type="text")


def _mismatch(config: RunConfig, data_type: str, models: str) -> str:
    """The message for a data set of this type, such as "text", that needs one of `models`."""
    problem = f"data set {config.dataset} contains {data_type}, which {config.model} cannot take"
    return f"{problem}: use {models}"


def _require_unset(config: RunConfig, names: tuple[str, ...], data_type: str) -> None:
    """Raise `RunError` if one of these settings, which are for data of this type, is set."""
    for name in names:
        if getattr(config, name):
            raise RunError(
                f"{name.replace('_', ' ')} is for {data_type}: leave it out for {config.dataset}"
            )


def locate_data(config: RunConfig, data: str | None, saved: SavedRun | None, out: Path) -> str:
    """The path of the data: `data`, else the path of the `saved` run in `out`, else "data".

    Raises `RunError` if the path of the user's data is missing, if the data of `saved` do not exist
    any more, or if `data` is given for a data set that comes with a library.
    """
    dataset = config.dataset
    row = DATASETS[dataset]
    if data is not None:
        if row.source is Source.LIBRARY:
            raise RunError(
                f"--data {data}: {dataset} is part of a library, so leave out --data; for your "
                "images use --dataset folder, for your text --dataset text"
            )
        return data
    if saved is not None and saved.data is not None:
        if not os.path.exists(saved.data):
            raise RunError(
                f"{out}: the data of this run are no longer at {saved.data}; give their new path "
                "with --data"
            )
        return saved.data
    # Older versions did not save the path, and took the default for the user's own data too.
    may_be_older_run = saved is not None and os.path.exists(_DOWNLOAD_FOLDER)
    if row.source is Source.USER and not may_be_older_run:
        description = "text" if row.is_text else "folder of images"
        raise RunError(f"--dataset {dataset} needs --data: the path of your {description}")
    return _DOWNLOAD_FOLDER


def load_data(
    config: RunConfig, folder: str | os.PathLike, *, augment: bool = True, download: bool = True
) -> DataSplits:
    """Load the data of a run from `folder`, which may be the file of a text.

    `augment`, `download` and the errors are the same as for `load_dataset`.
    """
    options = LoadOptions(
        folder=Path(folder),
        limit=config.limit,
        seed=config.seed if augment else None,
        image_size=config.image_side,
        skip_damaged=config.skip_damaged,
        download=download,
        context=config.passage_length,
        tokenizer=config.tokenizer,
        vocabulary=config.vocabulary,
    )
    return load(config.dataset, options)
