"""`amp-lab export`: write the checkpoint of a run as one file."""

import argparse


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    export = commands.add_parser(
        "export",
        help="write the checkpoint of a run as one file",
        description="Write the checkpoint of a run as one file, which plain torch.load reads: what "
        "FSDP has written in shards is put together.",
    )
    export.add_argument("run_folder", metavar="DIR", help="the folder of the run")
    export.add_argument("file", metavar="FILE", help="the file to write")
    export.add_argument("--force", action="store_true", help="replace a file of another kind")
    export.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the file."""
    from amp_lab.training import run as runs  # here, since it loads torch

    runs.export(options.run_folder, options.file, force=options.force)
    print(f"Written: {options.file}")
