"""`amp-lab train`: train an image classifier, in a folder, resumably."""

import argparse
import functools
from dataclasses import fields

from amp_lab.cli.printing import print_no_more


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    train = commands.add_parser(
        "train",
        help="train an image classifier, in a folder, resumably",
        description="Train a classifier of torchvision in any precision. The folder given by --out "
        "gets config.json, metrics.csv, loss.png, accuracy.png and checkpoint.pt; a run that was "
        "stopped or killed goes on with --resume, and ends as if it had not been.",
    )
    # No defaults here: a run that is resumed takes what is not given from its folder.
    run = train.add_argument_group("settings of the run, which --resume cannot change")
    option = functools.partial(run.add_argument, default=argparse.SUPPRESS)
    option("--dataset", metavar="NAME", help="digits (default), cifar10, caltech256")
    option("--model", metavar="NAME", help="a classifier of torchvision (default: mobilenet_v2)")
    option("--precision", metavar="NAME", help="fp32 (default), tf32, fp16, bf16")
    option("--batch-size", type=int, metavar="N", help="images in a batch (default: 64)")
    option("--epochs", type=int, metavar="N", help="default: 15")
    option("--lr", type=float, metavar="X", help="highest learning rate (default: 0.002)")
    option("--seed", type=int, metavar="N", help="default: 0")
    option("--image-size", type=int, metavar="N", help="in pixels (default: the data set's own)")
    option("--limit", type=int, metavar="N", help="train on at most so many images")
    option("--accumulate", type=int, metavar="N", help="batches for each step (default: 1)")
    option("--clip-norm", type=float, metavar="X", help="largest norm of a step's gradients")
    option("--pretrained", action="store_true", help="start from ImageNet weights")
    option("--freeze", action="store_true", help="train the head alone")
    option("--channels-last", action="store_true", help="keep images as N, H, W, C")
    option("--compile", action="store_true", help="compile the model")
    option("--skip-damaged", action="store_true", help="leave out images that cannot be decoded")

    train.add_argument("--out", required=True, metavar="DIR", help="the folder of the run")
    train.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    train.add_argument(
        "--data", default="data", metavar="DIR", help="where data sets are kept (default: data)"
    )
    train.add_argument(
        "--device", metavar="NAME", help="default: AMP_LAB_DEVICE, else accelerator, else cpu"
    )
    train.add_argument("--workers", type=int, metavar="N", help="processes that load images")
    train.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help="save also after so many steps (default: after each epoch)",
    )
    together = train.add_argument_group(
        "several processes",
        "started by: torchrun --nproc-per-node N -m amp_lab train … --parallel ddp",
    )
    together.add_argument(
        "--parallel", metavar="NAME", help="ddp: gradients averaged; fsdp: all sharded (FSDP2)"
    )
    together.add_argument(
        "--reduce-dtype",
        default="fp32",
        metavar="NAME",
        help="in which gradients are summed: fp32 (default), bf16, fp16",
    )
    together.add_argument(
        "--timeout",
        type=float,
        default=300,
        metavar="SECONDS",
        help="how long to wait for another process (default: 300)",
    )
    train.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train; return the exit code."""
    from amp_lab.training import run as runs

    def say(line: str) -> None:
        try:
            print(line, flush=True)
        except BrokenPipeError:  # whoever read along has seen enough, but the run goes on
            print_no_more()

    given = vars(options)
    stopped_by = runs.train(
        {field.name: given[field.name] for field in fields(runs.RunConfig) if field.name in given},
        options.out,
        resume=options.resume,
        data=options.data,
        device=options.device,
        workers=options.workers,
        checkpoint_every=options.checkpoint_every,
        parallel=options.parallel,
        reduce_dtype=options.reduce_dtype,
        timeout_s=options.timeout,
        say=say,
    )
    return 0 if stopped_by is None else 128 + stopped_by  # as a shell counts it
