"""`amp-lab train`: train an image classifier or a language model, in a folder, resumably.

The options are the fields in `train/train_options.py`. To add an option, add a field there.
"""

import argparse
import dataclasses
from typing import Any, get_args

from amp_lab.cli.printing import drop_unwritten
from amp_lab.core.requirements import require_matplotlib
from amp_lab.train.train_options import TOGETHER, RunConfig, RunOptions


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "train",
        help="train an image classifier or a language model, and resume interrupted runs",
        description="Train a classifier of torchvision, or a GPT on text, in any precision. The "
        "command writes config.json, metrics.csv, loss.png, accuracy.png and checkpoint.pt to the "
        "folder --out. To continue a run that was stopped or killed, use --resume: on a CPU, the "
        "result is the same as without the interruption.",
    )
    heading = "settings of the run; with --resume, you can only increase --epochs"
    settings = parser.add_argument_group(heading)
    for field in dataclasses.fields(RunConfig):
        # No default: a run that is resumed takes what is not given from its folder.
        _add_option(settings, field, default=argparse.SUPPRESS)
    start_line = "start with: torchrun --nproc-per-node N -m amp_lab train … --parallel ddp"
    groups = {"": parser, TOGETHER: parser.add_argument_group(TOGETHER, start_line)}
    for field in dataclasses.fields(RunOptions):
        group = groups[field.metadata["group"]]
        if field.default is dataclasses.MISSING:
            _add_option(group, field, required=True)
        else:
            _add_option(group, field, default=field.default)
    parser.set_defaults(run=run)


def _add_option(group, field: dataclasses.Field, **default: object) -> None:
    """Add the option of a field: ``--batch-size`` for `batch_size`.

    `default` has the rest of the keywords of `add_argument`: ``default`` or ``required``.
    """
    name = "--" + field.name.replace("_", "-")
    text = field.metadata["help"]
    if field.type is bool:
        group.add_argument(name, action="store_true", help=text, **default)
        return
    value_type = field.type
    if get_args(value_type):
        value_type = get_args(value_type)[0]  # int of `int | None`
    metavar = field.metadata["metavar"]
    group.add_argument(name, metavar=metavar, type=value_type, help=text, **default)


def run(options: argparse.Namespace) -> int:
    """Train; return the exit code."""
    from amp_lab.core.allocator import keep_memory
    from amp_lab.train import run as runs

    require_matplotlib("train")  # which draws at the end
    keep_memory()  # on a CPU, new memory for large tensors may cost as much as the step

    def say(line: str) -> None:
        try:
            print(line, flush=True)
        except OSError:  # the reader of a pipe has ended, or a disk is full: the run goes on
            drop_unwritten()

    settings = _fields_given(options, RunConfig)
    config = RunConfig(**settings)
    run_options = RunOptions(**_fields_given(options, RunOptions))
    stopped_by = runs.train(config, run_options, given=tuple(settings), say=say)
    if stopped_by is None:
        return 0
    return 128 + stopped_by  # as a shell does for a program that this signal ended


def _fields_given(options: argparse.Namespace, dataclass: type) -> dict[str, Any]:
    """The values of options that are fields of a dataclass, by name, without those not given."""
    values = vars(options)
    names = [field.name for field in dataclasses.fields(dataclass)]
    return {name: values[name] for name in names if name in values}
