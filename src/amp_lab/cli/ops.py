"""`amp-lab ops`: autocast's rule for each op."""

import argparse

from amp_lab.cli.model_argument import add_absent_device, dtype_of, use_absent_device
from amp_lab.cli.printing import add_format, show


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    ops = commands.add_parser(
        "ops",
        help="print autocast's rule for each op, on any device",
        description="Print the rule that autocast has for each op on a backend. Each rule is "
        "checked by calling the op.",
    )
    add_absent_device(ops)
    ops.add_argument(
        "--dtype",
        choices=("fp16", "bf16"),
        help="autocast's dtype (default: the backend's default)",
    )
    against = "print only the ops whose rule differs on this other backend"
    ops.add_argument("--against", metavar="NAME", help=against)
    add_format(ops)
    ops.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the table of rules."""
    from amp_lab.tracing.op_table import differences, op_table

    use_absent_device(options)
    dtype = dtype_of(options.dtype)  # one for both sides, or the dtype would be a difference
    table = op_table(options.device, dtype)
    if options.against:
        table = differences(table, op_table(options.against, dtype))
    show(table, options.format)
