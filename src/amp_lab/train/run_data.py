"""The data of a run: checks that its settings fit them, finds where they are, and loads them."""

import os
from pathlib import Path

from amp_lab.core.errors import RunError
from amp_lab.models.gpt import SIZES
from amp_lab.train.data import (
    COME_WITH_LIBRARIES,
    TEXTS,
    USERS_OWN,
    ImageData,
    load_dataset,
    load_text,
)
from amp_lab.train.run_folder import SavedRun
from amp_lab.train.train_options import RunConfig

_DOWNLOAD_FOLDER = "data"
_IMAGE_SETTINGS = ("channels_last", "image_size", "skip_damaged")
_TEXT_SETTINGS = ("context", "tokenizer", "vocabulary")


def require_match(config: RunConfig) -> None:
    """Raise `RunError` if the model or a setting does not go with the data set.

    Text needs a GPT, images a classifier, and some settings are for one of the two alone.
    """
    is_text = config.dataset in TEXTS
    is_gpt = config.model in SIZES
    if is_text and not is_gpt:
        raise RunError(_mismatch(config, "a text", models=", ".join(SIZES)))
    if is_gpt and not is_text:
        raise RunError(_mismatch(config, "images", models="a classifier of torchvision"))
    if is_text:
        _require_unset(config, _IMAGE_SETTINGS, data_type="images")
    else:
        _require_unset(config, _TEXT_SETTINGS, data_type="text")


def _mismatch(config: RunConfig, data_type: str, models: str) -> str:
    """The message for a data set of this type, such as "a text", that needs one of `models`."""
    return f"{config.dataset} is {data_type}, and the model {config.model}: give {models}"


def _require_unset(config: RunConfig, names: tuple[str, ...], data_type: str) -> None:
    """Raise `RunError` if one of these settings, which are for data of this type, is set."""
    for name in names:
        if getattr(config, name):
            raise RunError(f"{name.replace('_', ' ')} is for {data_type}, not for {config.dataset}")


def locate_data(config: RunConfig, data: str | None, saved: SavedRun | None, out: Path) -> str:
    """The path of the data: `data`, else that of the `saved` run in `out`, else the folder "data".

    Raises `RunError` if there is no path for the user's own data, if the data of `saved` are no
    longer there, and if `data` is given for a data set that comes with a library.
    """
    dataset = config.dataset
    if data is not None:
        if dataset in COME_WITH_LIBRARIES:
            raise RunError(
                f"--data {data}: {dataset} comes with a library and takes none; your own images "
                "are --dataset folder, and your own text is --dataset text"
            )
        return data
    if saved is not None and saved.data is not None:
        if not os.path.exists(saved.data):
            raise RunError(
                f"{out}: its data were at {saved.data}, and are not there now; give --data with "
                "where they are"
            )
        return saved.data
    # Older versions did not save the path, and took the default for the user's own data too.
    may_be_older_run = saved is not None and os.path.exists(_DOWNLOAD_FOLDER)
    if dataset in USERS_OWN and not may_be_older_run:
        description = "text" if dataset in TEXTS else "folder of images"
        raise RunError(f"--dataset {dataset}: give your {description} with --data")
    return _DOWNLOAD_FOLDER


def load_data(
    config: RunConfig, folder: str | os.PathLike, *, augment: bool = True, download: bool = True
) -> ImageData:
    """Load the images of a run from `folder`, or its text from that file or folder.

    `augment` and `download` are those of `load_dataset`; a text is never downloaded. Raises
    `DataError` as `load_dataset` does.
    """
    if config.dataset in TEXTS:
        return load_text(
            config.dataset,
            Path(folder),
            context=config.context,
            tokenizer=config.tokenizer,
            vocabulary=config.vocabulary,
            limit=config.limit,
            seed=config.seed if augment else None,  # a text is augmented by random offsets
        )
    return load_dataset(
        config.dataset,
        Path(folder),
        image_size=config.image_size,
        limit=config.limit,
        seed=config.seed,
        skip_damaged=config.skip_damaged,
        augment=augment,
        download=download,
    )
