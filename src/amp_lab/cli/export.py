"""`amp-lab export`: write a run as one file: its checkpoint, or its model for use elsewhere."""

import argparse
from pathlib import Path

# The default of --format, by the ending of the file.
_FORMATS = {".safetensors": "safetensors", ".onnx": "onnx", ".pt2": "pt2"}


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    export = commands.add_parser(
        "export",
        help="write a trained model as one checkpoint, safetensors, ONNX or pt2",
        description="Write the checkpoint of a run as one file, which plain torch.load reads: what "
        "FSDP has written in shards is put together. Or write the model, for use elsewhere: as "
        "weights (.safetensors), for ONNX Runtime (.onnx) or as a program of torch.export (.pt2). "
        "Such a file is read again and run before it takes its name.",
    )
    option = export.add_argument
    forms = ["checkpoint", *_FORMATS.values()]
    option("run_folder", metavar="DIR", help="the folder of the run")
    option("file", metavar="FILE", help="the file to write")
    option("--format", choices=forms, help="default: by FILE's ending, else checkpoint")
    option("--dtype", choices=("fp32", "fp16", "bf16"), help="cast the model to it (default: fp32)")
    option("--data", metavar="DIR", help="where its data are (default: where the run had them)")
    option("--force", action="store_true", help="replace a file that is there")
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
        raise OptionError(f"{option}: a checkpoint is written as it is; give --format as well")
    export.export_checkpoint(options.run_folder, options.file, force=options.force)
    print(f"Written: {options.file}")
