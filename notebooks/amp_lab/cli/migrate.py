"""`amp-lab migrate`: old mixed-precision code to today's names."""

import argparse
import sys
from collections import Counter


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    migrate = commands.add_parser(
        "migrate",
        help="bring old mixed-precision code to today's names, and find its mistakes",
        description="Print a diff from torch.cuda.amp, torch.cpu.amp and NVIDIA Apex to torch.amp, "
        "and what is to be done by hand, with line numbers. Files and notebooks are left as they "
        "are without --write.",
    )
    migrate.add_argument("paths", nargs="+", metavar="PATH", help="a file, notebook or folder")
    how = migrate.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="change the files")
    how.add_argument("--check", action="store_true", help="exit 1 if something is to be done")
    migrate.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is to be done, or do it; return the exit code."""
    from amp_lab.migrate.files import migrate_paths

    results = []
    for result in migrate_paths(options.paths, write=options.write):
        results.append(result)
        if result.error is not None:
            print(f"amp-lab migrate: {result.error}", file=sys.stderr)
        print(result.diff, end="")
    if any(result.lines for result in results):
        print()
    for result in results:
        for line in result.lines:
            print(f"{result.path}:{line}")
    kinds = Counter(line.kind for result in results for line in result.lines)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("rewritten", "by hand", "left"))
    changed = sum(result.written if options.write else bool(result.diff) for result in results)
    files = f"{changed} file{'s' * (changed != 1)}"
    if kinds:
        print(
            f"{counts}, {kinds['mistake']} mistake{'s' * (kinds['mistake'] != 1)}; "
            f"{files} {'changed' if options.write else 'to change with --write'}"
        )
    elif not any(result.error for result in results):
        print("nothing to do")
    if any(result.error for result in results):
        return 2
    return 1 if options.check and any(result.to_do for result in results) else 0
