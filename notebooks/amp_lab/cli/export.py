"""`amp-lab export`: write a run as one file: its checkpoint, or its model for use elsewhere."""

import argparse
from pathlib import Path

# What is written, by the ending of the file, if --format does not say it.
_FORMATS = {".safetensors": "safetensors", ".onnx": "onnx", ".pt2": "pt2"}
_DTYPES = ("fp32", "fp16", "bf16")


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    export = commands.add_parser(
        "export",
        help="write a run as one file, or its model as safetensors, ONNX or pt2",
        description="Write the checkpoint of a run as one file, which plain torch.load reads: what "
        "FSDP has written in shards is put together. Or write the model, for use elsewhere: as "
        "weights (.safetensors), for ONNX Runtime (.onnx) or as a program of torch.export (.pt2). "
        "Such a file is read again and run before it takes its name.",
    )
    export.add_argument("run_folder", metavar="DIR", help="the folder of the run")
    export.add_argument("file", metavar="FILE", help="the file to write")
    export.add_argument(
        "--format",
        choices=["checkpoint", *_FORMATS.values()],
        help="default: by FILE's ending, else checkpoint",
    )
    export.add_argument("--dtype", choices=_DTYPES, help="cast the model to it (default: fp32)")
    export.add_argument("--data", metavar="DIR", help="where its data sets are (default: data)")
    export.add_argument("--force", action="store_true", help="replace a file that is there")
    export.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the file."""
    from amp_lab.errors import OptionError
    from amp_lab.training import export  # here, since it loads torch

    form = options.format or _FORMATS.get(Path(options.file).suffix.lower(), "checkpoint")
    folder, file = options.run_folder, options.file
    if form != "checkpoint":
        how = {"data": options.data or "data", "force": options.force}
        export.export_model(folder, file, form, options.dtype or "fp32", **how)
        return
    if options.dtype or options.data:
        given = "--dtype" if options.dtype else "--data"
        raise OptionError(f"{given}: a checkpoint is written as it is; give --format as well")
    export.export_checkpoint(folder, file, force=options.force)
    print(f"Written: {file}")
