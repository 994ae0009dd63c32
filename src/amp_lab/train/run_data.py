"""The images or the text of a run: where they are, and whether its settings fit them."""

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

_DEFAULT_FOLDER = "data"  # of data sets that are downloaded
_IMAGE_SETTINGS = ("channels_last", "image_size", "skip_damaged")
_TEXT_SETTINGS = ("context", "tokenizer", "vocabulary")


def require_match(config: RunConfig) -> None:
    """Raise `RunError` for images with a language model, a text with a classifier, and the like."""
    is_text = config.dataset in TEXTS
    is_gpt = config.model in SIZES
    if is_text and not is_gpt:
        raise RunError(_mismatch(config, "a text", ", ".join(SIZES)))
    if is_gpt and not is_text:
        raise RunError(_mismatch(config, "images", "a classifier of torchvision"))
    if is_text:
        _require_unset(config, _IMAGE_SETTINGS, "images")
    else:
        _require_unset(config, _TEXT_SETTINGS, "text")


def _mismatch(config: RunConfig, kind: str, models: str) -> str:
    return f"{config.dataset} is {kind}, and the model {config.model}: give {models}"


def _require_unset(config: RunConfig, names: tuple[str, ...], kind: str) -> None:
    """Raise `RunError` for a setting that is for data of another kind."""
    for name in names:
        if getattr(config, name):
            raise RunError(f"{name.replace('_', ' ')} is for {kind}, not for {config.dataset}")


def locate_data(config: RunConfig, given: str | None, saved: SavedRun | None, out: Path) -> str:
    """Where the data of a run are: what was `given`, or where they were for the run in `out`.

    Raises `RunError` if that is not known, or given without need.
    """
    dataset = config.dataset
    if given is not None:
        if dataset in COME_WITH_LIBRARIES:
            raise RunError(
                f"--data {given}: {dataset} comes with a library and takes none; your own images "
                "are --dataset folder, and your own text is --dataset text"
            )
        return given
    if saved is not None and saved.data is not None:
        if not os.path.exists(saved.data):
            raise RunError(
                f"{out}: its data were at {saved.data}, and are not there now; give --data with "
                "where they are"
            )
        return saved.data
    # A run that an older version began may have found them in the folder that is the default.
    if saved is None or not os.path.exists(_DEFAULT_FOLDER):
        _require_not_yours(dataset)
    return _DEFAULT_FOLDER


def _require_not_yours(dataset: str) -> None:
    """Raise `RunError` for a data set that is nowhere unless `--data` says where."""
    if dataset in USERS_OWN:
        kind = "text" if dataset in TEXTS else "folder of images"
        raise RunError(f"--dataset {dataset}: give your {kind} with --data")


def load_data(
    config: RunConfig, folder: str | os.PathLike, *, augment: bool = True, download: bool = True
) -> ImageData:
    """The images or the text of a run; raises `DataError` as `load_dataset` and `load_text` do."""
    if config.dataset in TEXTS:
        return load_text(
            config.dataset,
            Path(folder),
            context=config.context,
            tokenizer=config.tokenizer,
            vocabulary=config.vocabulary,
            limit=config.limit,
            seed=config.seed if augment else None,
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
