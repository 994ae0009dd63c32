"""`amp-lab memory`: forecast the memory of a training step."""

import argparse

from amp_lab.cli.model_argument import add_model, inputs_of
from amp_lab.cli.printing import show


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    memory = commands.add_parser(
        "memory",
        help="forecast the memory of a training step, on a device that need not be here",
        description="Print what a training step needs in each precision, and the largest batch.",
    )
    add_model(memory)
    option, named = memory.add_argument, {"metavar": "NAME"}
    precisions = "fp32, tf32, fp16, bf16; may be repeated (default: fp32, fp16, bf16)"
    option("--memory", metavar="SIZE", help="of the card, such as 24GiB or 24GB")
    option("--precision", action="append", **named, help=precisions)
    option("--optimizer", default="adam", **named, help="default: adam; also sgd, adamw, …")
    memory.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Forecast, and print the table."""
    from amp_lab.cli.model_argument import load_model
    from amp_lab.tracing import compare_memory

    shapes, dtypes = zip(*inputs_of(options), strict=True)  # as `compare_memory` has them
    # What is not asked for is left to the function's own default.
    asked = {"precisions": options.precision} if options.precision else {}
    table = compare_memory(
        load_model(options.target),
        shapes,
        memory_bytes=options.memory,
        device_type=options.device,
        optimizer=options.optimizer,
        input_dtype=dtypes,
        **asked,
    )
    show(table, options.format)
