"""`amp-lab export`: write the checkpoint or the model of a run as one file."""

import argparse
from pathlib import Path

# The default of --format, by the ending of the file.
_FORMATS = {".safetensors": "safetensors", ".onnx": "onnx", ".pt2": "pt2"}


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    export = commands.add_parser(
        "export",
        help="write a trained model as one checkpoint, safetensors, ONNX or pt2",
        description="Write the checkpoint of a run as one file that torch.load reads. Shards of "
        "FSDP are joined. Other formats contain only the model: its weights (.safetensors), a "
        "model for ONNX Runtime (.onnx), or a torch.export program (.pt2). Before the command "
        "writes such a file, it runs the exported model and compares the outputs.",
    )
    option = export.add_argument
    forms = ["checkpoint", *_FORMATS.values()]
    option("run_folder", metavar="DIR", help="the folder of the run")
    option("file", metavar="FILE", help="the file to write")
    option(
        "--format", choices=forms, help="format of FILE (default: by its ending, else checkpoint)"
    )
    dtypes = ("fp32", "fp16", "bf16")
    option("--dtype", choices=dtypes, help="cast the model to this dtype (default: fp32)")
    option(
        "--data", metavar="DIR", help="path of the run's data (default: the path that the run used)"
    )
    option("--force", action="store_true", help="replace FILE if it exists")
    export.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the model in the format asked for, or the checkpoint."""
    from amp_lab.core.errors import OptionError
    from amp_lab.train import export  # here, since it loads torch

    form = options.format or _FORMATS.get(Path(options.file).suffix.lower(), "checkpoint")
    if form != "checkpoint":
        export.export_model(
            options.run_folder,
            options.file,
            form,
            options.dtype or "fp32",
            data=options.data,
            force=options.force,
        )
        return
    if options.dtype or options.data:
        option = "--dtype" if options.dtype else "--data"
        raise OptionError(f"{option} does not apply to a checkpoint: give --format for a model")
    export.export_checkpoint(options.run_folder, options.file, force=options.force)
    print(f"Written: {options.file}")
