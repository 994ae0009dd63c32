"""How the commands print: results in the format asked for, and errors in a line."""

import os
import sys
import time

FORMAT = {"choices": ("table", "markdown", "json"), "default": "table", "help": "default: table"}
"""Settings of the option ``--format``."""


def show(result, form: str) -> None:
    """Print a result of the tools in the format asked for."""
    print(result if form == "table" else getattr(result, f"to_{form}")())


def tell(line: str, at_once: bool = False) -> None:
    """Print an error.

    Of the processes that torchrun started on a machine, the first tells what all have met, and
    torchrun then ends the others. Only if it does not is there something for another one to tell.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" and not at_once:
        time.sleep(3)
    print(line, file=sys.stderr, flush=True)


def print_no_more() -> None:
    """Send what is still printed nowhere, since nobody reads it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_warning(command: str, message: Warning, *where: object) -> None:
    """Print a warning in a line, as `warnings.showwarning` would in two."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the others have the same to say
        print(f"amp-lab {command}: {message}", file=sys.stderr)
