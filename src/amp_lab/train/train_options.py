"""What a run is started with; `amp-lab train` has an option for each of these fields.

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

_Check = Callable[[str, Any], None]


def setting(
    default: object, help: str, metavar: str = "", check: _Check | None = None, group: str = ""
) -> Any:  # as `dataclasses.field`, so that it may stand for a value of any type
    """A field that is an option of the command line too; its first type is the type of both.

    `help` may name the default as ``{}``. `check` is given the name and the value, unless that is
    None, and raises `RunError` if it makes no sense. `group` is the heading in the command's help.
    """
    about = {"help": help.format(default), "metavar": metavar, "check": check, "group": group}
    return dataclasses.field(default=default, metadata=about)


_MAX_COUNT = 10**9  # one beyond it is a typing error, or no number at all


def _at_least(
    minimum: int,
    message: str = "{name} must be at least {minimum}, not {value}",
    maximum: int = _MAX_COUNT,
) -> _Check:
    def check(name: str, value: int) -> None:
        if value < minimum:
            raise RunError(message.format(name=name, minimum=minimum, value=value))
        if value > maximum:
            raise RunError(f"{name} must be at most {maximum:,}")

    return check


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise RunError(f"{name} must be a positive number, not {value}")


def _seed(name: str, value: int) -> None:
    if not 0 <= value < 2**63:  # what torch's generators take
        raise RunError(f"{name} must be from 0 to 2^63 - 1, not {value}")


def _known(name: str, value: str) -> None:
    # They load torch, which the command's help need not wait for.
    from amp_lab.core.precision import Precision
    from amp_lab.train.data import DATASETS

    if name == "dataset":
        _require_one_of(list(DATASETS), "data set", value)
    else:
        _require_one_of(list(Precision), name, value)


def _require_one_of(names: list[str], kind: str, value: str) -> None:
    if value not in names:
        raise RunError(f"no {kind} {value!r}; there are {', '.join(names)}")


_count = _at_least(1)
_side = _at_least(1, maximum=8192)


@dataclass(frozen=True)
class _Checked:
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
class RunConfig(_Checked):
    """What decides the result of a run. Raises `RunError` for a value that makes no sense.

    A run that was saved before there was some field goes on with its default, which therefore must
    be what runs did until then.
    """

    dataset: str = setting(
        "digits", "{} (default), cifar10, caltech256, folder, stdlib, text", "NAME", _known
    )
    model: str = setting("mobilenet_v2", "of torchvision, or gpt-nano … (default: {})", "NAME")
    precision: str = setting("fp32", "{} (default), tf32, fp16, bf16", "NAME", _known)
    # Of all processes together. A last batch of an epoch that would be smaller is left out, since
    # batch norm and the mean over the ranks want them equal.
    batch_size: int = setting(64, "images or passages in a batch (default: {})", "N", _count)
    epochs: int = setting(15, "default: {}", "N", _count)
    lr: float = setting(2e-3, "highest learning rate (default: {})", "X", _positive)  # one cycle's
    # Of the initial weights, the order of the images, the augmentation and dropout.
    seed: int = setting(0, "default: {}", "N", _seed)
    image_size: int | None = setting(None, "in pixels (default: the data set's own)", "N", _side)
    context: int | None = setting(None, "tokens in a passage of text (256)", "N", _count)
    tokenizer: str | None = setting(
        None, "bpe, or a tokenizer.json (default: a character is a token)", "bpe|FILE"
    )
    vocabulary: int | None = setting(None, "byte pairs that bpe learns (4096)", "N", _count)
    limit: int | None = setting(None, "train on at most so many images or passages", "N", _count)
    accumulate: int = setting(1, "batches for each step (default: {})", "N", _count)
    clip_norm: float | None = setting(None, "largest norm of a step's gradients", "X", _positive)
    pretrained: bool = setting(False, "start from ImageNet weights")
    freeze: bool = setting(False, "train the head alone")
    channels_last: bool = setting(False, "keep images as N, H, W, C")
    compile: bool = setting(False, "compile the model")
    skip_damaged: bool = setting(False, "leave out images that cannot be decoded")

    def __post_init__(self):
        super().__post_init__()
        # JSON and checkpoints take text, and whoever calls from Python may give the enum.
        object.__setattr__(self, "precision", str(self.precision))


TOGETHER = "several processes"


def _parallel_setting(default: object, help: str, metavar: str) -> Any:
    return setting(default, help, metavar, group=TOGETHER)


@dataclass(frozen=True)
class RunOptions(_Checked):
    """What may be another when a run is resumed: where, on what, and in how many processes."""

    out: str = setting(dataclasses.MISSING, "the folder of the run", "DIR")
    resume: bool = setting(False, "go on with the run in that folder")
    # None: nowhere for those that come with a library, "data" for those that are downloaded.
    data: str | None = setting(
        None, "your images or text; or where data sets are kept (default: data)", "PATH"
    )
    device: str | None = setting(
        None, "default: AMP_LAB_DEVICE, else accelerator, else cpu", "NAME"
    )
    # None: as many as are of use.
    workers: int | None = setting(None, "processes that load images", "N", _at_least(0))
    checkpoint_every: int | None = setting(
        None,
        "save also after so many steps (default: after each epoch)",
        "STEPS",
        _at_least(1, "checkpoint every {value} steps: must be at least {minimum}"),
    )
    parallel: str | None = _parallel_setting(
        None, "ddp: gradients averaged; fsdp: all sharded (FSDP2)", "NAME"
    )
    reduce_dtype: str = _parallel_setting(
        "fp32", "in which gradients are summed: {} (default), bf16, fp16", "NAME"
    )
    timeout: float = _parallel_setting(
        300, "how long to wait for another process (default: {})", "SECONDS"
    )

    def __post_init__(self):
        for name in ("out", "data"):  # from Python they may be paths of `pathlib`
            path = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, os.fspath(path))
        super().__post_init__()
