"""The settings of a run; `amp-lab train` has an option for each of these fields.

To add a setting, add a field here, and use it in `run`.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amp_lab.core.errors import RunError
from amp_lab.core.files import require_types
from amp_lab.train.registry import CONTEXT, DATASETS

_Check = Callable[[str, Any], None]
"""Takes the name of a setting and its value, and raises `RunError` if the value is wrong."""


def setting(
    default: object, help: str, metavar: str = "", check: _Check | None = None, group: str = ""
) -> Any:  # so that a type checker accepts it as the default of any field
    """Declare a dataclass field that is also an option of the command line.

    The first type of its annotation is the type of the option: int of ``int | None``. In `help`,
    ``{}`` stands for the default, and `metavar` is the help's name for the value. `check` is not
    called for None. `group` is the heading under which the command's help lists the option.
    """
    metadata = {"help": help.format(default), "metavar": metavar, "check": check, "group": group}
    return dataclasses.field(default=default, metadata=metadata)


_MAX_COUNT = 10**9  # a larger number is a typing error


def _make_range_check(
    minimum: int,
    message: str = "{name} must be at least {minimum}, not {value}",
    maximum: int = _MAX_COUNT,
) -> _Check:
    """Make a check that a whole number is from `minimum` to `maximum`.

    `message` is that of a smaller number, and is filled in with name, minimum and value.
    """

    def check(name: str, value: int) -> None:
        if value < minimum:
            raise RunError(message.format(name=name, minimum=minimum, value=value))
        if value > maximum:
            raise RunError(f"{name} must be at most {maximum:,}")

    return check


def _require_positive(name: str, value: float) -> None:
    """Raise `RunError` unless `value` is positive and finite."""
    if not (value > 0 and math.isfinite(value)):
        raise RunError(f"{name} must be a positive number, not {value}")


def _require_seed(name: str, value: int) -> None:
    """Raise `RunError` for a seed that torch's generators do not take."""
    if not 0 <= value < 2**63:
        raise RunError(f"{name} must be from 0 to 2^63 - 1, not {value}")


def _require_dataset(name: str, value: str) -> None:
    """Raise `RunError` for a `value` that is not a data set."""
    _require_one_of(list(DATASETS), "data set", value)


def _require_precision(name: str, value: str) -> None:
    """Raise `RunError` for a `value` that is not a precision."""
    # Imported here, since it loads torch, and the command's help need not wait for it.
    from amp_lab.core.precision import Precision

    _require_one_of(list(Precision), name, value)


def _require_one_of(names: list[str], description: str, value: str) -> None:
    """Raise `RunError` unless `value` is one of `names`; `description` says what they name."""
    if value not in names:
        raise RunError(f"unknown {description} {value!r}: use one of {', '.join(names)}")


def _list_datasets(default: str) -> str:
    """The help's list of all data sets, the default first."""
    others = [name for name in DATASETS if name != default]
    return ", ".join([f"data set: {default} (default)", *others])


# Checks, which are called with name and value as `_require_positive` is.
_require_count = _make_range_check(1)
_require_side = _make_range_check(1, maximum=8192)  # of an image, in pixels


@dataclass(frozen=True)
class _CheckedSettings:
    """Base of a dataclass of `setting` fields: a new object checks their types and values.

    Raises `RunError` for the first that is wrong.
    """

    def __post_init__(self):
        try:
            require_types(self)
        except TypeError as error:
            raise RunError(str(error)) from None
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check = field.metadata["check"]
            if check is not None and value is not None:
                check(field.name.replace("_", " "), value)


@dataclass(frozen=True)
class RunConfig(_CheckedSettings):
    """The settings that decide the result of a run. Raises `RunError` for a wrong value.

    The default of a new field must keep the behaviour of older runs, because a run that was saved
    without the field is resumed with the default.
    """

    dataset: str = setting("digits", _list_datasets("digits"), "NAME", _require_dataset)
    model: str = setting(
        "mobilenet_v2",
        "a classifier of torchvision, or a GPT such as gpt-nano (default: {})",
        "NAME",
    )
    precision: str = setting("fp32", "{} (default), tf32, fp16 or bf16", "NAME", _require_precision)
    # Of all processes together. A smaller last batch of an epoch is left out: batch norm and the
    # mean over the ranks need batches of equal size.
    batch_size: int = setting(
        64, "number of images or passages in a batch (default: {})", "N", _require_count
    )
    epochs: int = setting(15, "number of epochs (default: {})", "N", _require_count)
    # The peak of a one-cycle schedule.
    lr: float = setting(2e-3, "highest learning rate (default: {})", "X", _require_positive)
    # For the initial weights, the order of the images, the augmentation and dropout.
    seed: int = setting(0, "random seed (default: {})", "N", _require_seed)
    image_size: int | None = setting(
        None, "height and width in pixels (default: those of the data set)", "N", _require_side
    )
    context: int | None = setting(
        None, f"number of tokens in a passage of text (default: {CONTEXT})", "N", _require_count
    )
    tokenizer: str | None = setting(
        None, "bpe, or a tokenizer.json (default: each character is a token)", "bpe|FILE"
    )
    vocabulary: int | None = setting(
        None, "number of tokens in the vocabulary of bpe (default: 4096)", "N", _require_count
    )
    limit: int | None = setting(None, "train on at most N images or passages", "N", _require_count)
    accumulate: int = setting(
        1, "number of batches for each optimizer step (default: {})", "N", _require_count
    )
    clip_norm: float | None = setting(
        None, "clip the gradients to this norm", "X", _require_positive
    )
    pretrained: bool = setting(False, "start from ImageNet weights")
    freeze: bool = setting(False, "train only the last layer")
    channels_last: bool = setting(False, "use the memory format channels_last")
    compile: bool = setting(False, "compile the model")
    skip_damaged: bool = setting(False, "leave out images that cannot be decoded")

    def __post_init__(self):
        super().__post_init__()
        # A caller from Python may give a `Precision`, which checkpoints cannot hold.
        object.__setattr__(self, "precision", str(self.precision))

    @property
    def image_side(self) -> int:
        """Height and width of the images, in pixels."""
        return self.image_size or DATASETS[self.dataset].image_size

    @property
    def passage_length(self) -> int:
        """The number of tokens in a passage of text."""
        return self.context or CONTEXT


ALL_SETTINGS = tuple(field.name for field in dataclasses.fields(RunConfig))
TOGETHER = "several processes"


def _parallel_setting(default: object, help: str, metavar: str) -> Any:
    """A `setting` that the command's help lists under the heading for several processes."""
    return setting(default, help, metavar, group=TOGETHER)


@dataclass(frozen=True)
class RunOptions(_CheckedSettings):
    """The options that may change when a run is resumed: folders, device and processes."""

    out: str = setting(dataclasses.MISSING, "the folder of the run", "DIR")  # has no default
    resume: bool = setting(False, "resume the run in that folder")
    # None: see `run_data.locate_data`.
    data: str | None = setting(
        None, "path of your images or text, or of the folder with data sets (default: data)", "PATH"
    )
    device: str | None = setting(
        None, "device to train on (default: AMP_LAB_DEVICE, else the accelerator, else cpu)", "NAME"
    )
    # None: none for images in memory, up to 8 for image files.
    workers: int | None = setting(
        None, "number of processes that load images", "N", _make_range_check(0)
    )
    checkpoint_every: int | None = setting(
        None,
        "also save after this many steps (default: only after each epoch)",
        "STEPS",
        _make_range_check(1, "checkpoint every {value} steps: must be at least {minimum}"),
    )
    parallel: str | None = _parallel_setting(
        None, "ddp: average gradients; fsdp: also shard the model (FSDP2)", "NAME"
    )
    reduce_dtype: str = _parallel_setting(
        "fp32", "dtype in which gradients are summed: {} (default), bf16 or fp16", "NAME"
    )
    timeout: float = _parallel_setting(
        300, "longest wait for another process, in seconds (default: {})", "SECONDS"
    )

    def __post_init__(self):
        for name in ("out", "data"):  # a caller from Python may give a `pathlib.Path`
            path = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, os.fspath(path))
        super().__post_init__()
