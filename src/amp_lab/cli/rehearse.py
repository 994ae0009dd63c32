"""`amp-lab rehearse`: measure the errors of a model below 16 bits, on any machine."""

import argparse

from amp_lab.cli.memory_check import require_memory
from amp_lab.cli.model_argument import add_model, load_model
from amp_lab.cli.printing import require_figure, show
from amp_lab.core.errors import OptionError


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    rehearse = commands.add_parser(
        "rehearse",
        help="measure the errors of your model in FP8, MXFP8, MXFP4 and NVFP4, on any machine",
        description="Run a training step of a model with operands rounded to formats below 16 "
        "bits. Print the error of each layer, the layers to leave in bf16, and torchao's code for "
        "the others. With --eval, run a forward pass and print the code for inference.",
    )
    add_model(rehearse)
    option = rehearse.add_argument
    formats = "formats to try, separated by commas, such as fp8-rowwise,mxfp8,nvfp4"
    option("--formats", metavar="NAMES", help=formats)
    option(
        "--steps",
        type=int,
        default=0,
        metavar="N",
        help="also train N steps in each format (default: 0)",
    )
    option(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="with --steps: number of seeds (default: 3)",
    )
    option("--for", dest="gpu", metavar="GPU", help="forecast the speed-up on a GPU, such as h100")
    option(
        "--figure", metavar="FILE", help="draw a figure of the error of each layer, as PNG or SVG"
    )
    rehearse.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Rehearse, draw the errors with --figure, and print the result."""
    from amp_lab.core.gpus import gpu_of
    from amp_lab.formats.rehearsal import DEFAULT, rehearse
    from amp_lab.formats.scaling import format_of
    from amp_lab.recipes import INFERENCE, TRAINING

    names = options.formats.split(",") if options.formats else DEFAULT
    for name in names:  # raises for an unknown format, before anything slow
        format_of(name)
    if options.gpu:
        gpu_of(options.gpu)  # raises for an unknown GPU
    _require_count("--steps", options.steps, least=0)
    _require_count("--seeds", options.seeds, least=1)
    if options.eval and options.steps:
        raise OptionError("--steps is for training, and --eval for inference: leave one out")
    if options.figure:
        require_figure(options.figure, "rehearse --figure")
    require_memory(options, "cpu", "rehearse", inference=options.eval)
    with load_model(options, with_values=True) as loaded:
        call = loaded.call
        rehearsal = rehearse(
            call.model,
            *call.args,
            formats=names,
            loss_fn=call.loss_fn,
            steps=options.steps,
            seeds=options.seeds,
            gpu=options.gpu,
            use=INFERENCE if options.eval else TRAINING,
            **call.kwargs,
        )
    if options.figure:
        from amp_lab import plots

        plots.save(options.figure, plots.errors_by_layer, rehearsal.layers)
    show(rehearsal, options.format)


def _require_count(option: str, value: int, least: int) -> None:
    """Raise `OptionError` unless an option's value is from `least` to a million."""
    if not least <= value <= 10**6:
        raise OptionError(f"{option} {value}: give a number from {least} to {10**6:,}")
