"""The command line, `amp-lab …`: the one module that prints for a person and exits."""

import argparse
import functools
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import fields

from amp_lab import __version__
from amp_lab.errors import (
    AmpLabError,
    AmpLabWarning,
    BenchError,
    OptionError,
    OtherRankError,
)

# torch takes seconds to load, so the commands import it, not this module: --help answers at once.


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):  # the usage above it would bury the one line that matters
        _tell(f"{self.prog}: {message} (see {self.prog} --help)")
        self.exit(2)


def main(argv: list[str] | None = None) -> int:
    """Run `amp-lab` with these arguments; return its exit code.

    It is 0, or 2 for a user's mistake, or 128 plus the number of the signal that ended it; `migrate
    --check` returns 1 if something is to be done.
    """
    options = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", AmpLabWarning)
            warnings.showwarning = functools.partial(_show_warning, options.command)
            code = options.run(options) or 0
        sys.stdout.flush()
    except OtherRankError:
        return 2
    except AmpLabError as error:
        _tell(f"amp-lab {options.command}: {error}", at_once=error.is_of_one_rank)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        remedy = "run `pdm run sync`, or on AMD see the README"
        print(f"amp-lab {options.command}: torch is not installed; {remedy}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        _print_no_more()
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="amp-lab", description="Automatic mixed precision, on your own hardware and model."
    )
    parser.add_argument("--version", action="version", version=f"amp-lab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor",
        help="the machine, its precisions, what to use",
        description="Describe a device, measure which precisions it accelerates, say which to use.",
    )
    doctor.add_argument(
        "--device",
        metavar="NAME",
        help="cpu, cuda, cuda:1, xpu, mps (default: AMP_LAB_DEVICE, else accelerator)",
    )
    doctor.set_defaults(run=_doctor)
    _add_train(commands)
    _add_export(commands)
    _add_bench(commands)
    _add_ops(commands)
    _add_xray(commands)
    _add_memory(commands)
    _add_migrate(commands)
    return parser


def _add_train(commands) -> None:
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
    train.set_defaults(run=_train)


def _add_export(commands) -> None:
    export = commands.add_parser(
        "export",
        help="write the checkpoint of a run as one file",
        description="Write the checkpoint of a run as one file, which plain torch.load reads: what "
        "FSDP has written in shards is put together.",
    )
    export.add_argument("run_folder", metavar="DIR", help="the folder of the run")
    export.add_argument("file", metavar="FILE", help="the file to write")
    export.set_defaults(run=_export)


DEVICE = {"metavar": "NAME", "help": "cuda (also for ROCm; the default), xpu, mps, cpu"}
_DTYPES = ("fp16", "bf16", "fp32")
FORMAT = {"choices": ("table", "markdown", "json"), "default": "table", "help": "default: table"}


def _add_bench(commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="time training and inference in each precision, up to the limit of the device",
        description="Time workloads in each precision, from the plain recipe up to the limit of "
        "the device; print a table, and write it as JSON with a picture beside it.",
    )
    bench.add_argument(
        "--workload", action="append", metavar="NAME", help="may be repeated (default: all)"
    )
    bench.add_argument(
        "--precision",
        action="append",
        metavar="NAME",
        help="fp32, tf32, fp16, bf16; may be repeated (default: those that the device accelerates)",
    )
    bench.add_argument("--rung", action="append", metavar="NAME", help="may be repeated")
    bench.add_argument("--list", action="store_true", help="print workloads and rungs, and end")
    bench.add_argument("--quick", action="store_true", help="in less than 3 minutes")
    bench.add_argument("--rounds", type=int, metavar="N", help="turns (default: 10; 5 if quick)")
    bench.add_argument("--peers", action="store_true", help="other libraries' loops too")
    bench.add_argument(
        "--device", metavar="NAME", help="default: AMP_LAB_DEVICE, else accelerator, else cpu"
    )
    bench.add_argument(
        "--out",
        default="bench.json",
        metavar="FILE",
        help="JSON to write, with a .png beside it (default: bench.json)",
    )
    bench.add_argument(
        "--compare", nargs="+", metavar="FILE", help="print the result beside recorded ones"
    )
    bench.add_argument(
        "--results", metavar="FILE", help="take this recorded result, and measure nothing"
    )
    bench.add_argument("--format", **FORMAT)
    bench.set_defaults(run=_bench)


def _add_ops(commands) -> None:
    ops = commands.add_parser(
        "ops",
        help="what autocast does to each op, on a device that need not be here",
        description="Print the autocast rule of every op on a backend, each checked by a call.",
    )
    ops.add_argument("--device", default="cuda", **DEVICE)
    ops.add_argument("--dtype", choices=("fp16", "bf16"), help="default: the backend's own")
    ops.add_argument("--against", metavar="NAME", help="print how another backend differs")
    ops.add_argument("--format", **FORMAT)
    ops.set_defaults(run=_ops)


def _add_target(command: argparse.ArgumentParser) -> None:
    """The model, its input, the device."""
    command.add_argument(
        "target", metavar="PACKAGE.MODULE:CALLABLE", help="returns the model when it is called"
    )
    command.add_argument(
        "--input",
        required=True,
        action="append",
        metavar="SHAPE",
        help="such as 8,3,224,224; repeat it for a model with several inputs",
    )
    command.add_argument(
        "--input-dtype",
        choices=("float32", "int64", "bool"),
        action="append",
        help="once for all inputs or for each (default: float32; int64 for tokens)",
    )
    command.add_argument("--device", default="cuda", **DEVICE)
    command.add_argument("--format", **FORMAT)


def _add_xray(commands) -> None:
    xray = commands.add_parser(
        "xray",
        help="what autocast does to a model, on a device that need not be here",
        description="Print the dtypes that a model runs in under autocast, and what is to be said "
        "of them. Nothing is computed, so no such device is needed.",
    )
    _add_target(xray)
    xray.add_argument("--dtype", choices=_DTYPES, help="default: the backend's own; fp32: off")
    xray.add_argument(
        "--against",
        metavar="OTHER",
        help="print how it differs on another device (mps), in another dtype (bf16), or both "
        "(cpu:bf16)",
    )
    xray.add_argument("--real", action="store_true", help="run it on the device itself")
    xray.set_defaults(run=_xray)


def _add_memory(commands) -> None:
    memory = commands.add_parser(
        "memory",
        help="forecast the memory of a training step, on a device that need not be here",
        description="Print what a training step needs in each precision, and the largest batch.",
    )
    _add_target(memory)
    memory.add_argument("--memory", metavar="SIZE", help="of the card, such as 24GiB or 24GB")
    memory.add_argument(
        "--precision",
        action="append",
        metavar="NAME",
        help="fp32, tf32, fp16, bf16; may be repeated (default: fp32, fp16, bf16)",
    )
    memory.add_argument(
        "--optimizer", default="adam", metavar="NAME", help="default: adam; also sgd, adamw, …"
    )
    memory.set_defaults(run=_memory)


def _add_migrate(commands) -> None:
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
    migrate.set_defaults(run=_migrate)


def _tell(line: str, at_once: bool = False) -> None:
    """Print an error.

    Of the processes that torchrun started on a machine, the first tells what all have met, and
    torchrun then ends the others. Only if it does not is there something for another one to tell.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" and not at_once:
        time.sleep(3)
    print(line, file=sys.stderr, flush=True)


def _print_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(command: str, message: Warning, *where: object) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the others have the same to say
        print(f"amp-lab {command}: {message}", file=sys.stderr)


def _doctor(options: argparse.Namespace) -> None:
    import torch

    from amp_lab.device import describe_device, pick_device
    from amp_lab.precision import Precision

    report = describe_device(pick_device(options.device))
    memory = (
        "" if report.memory_bytes is None else f", {report.memory_bytes / 2**30:.1f} GiB of memory"
    )
    print(f"{report.name} ({report.device}: {report.backend}){memory}")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}\n")

    print(f"{'precision':<11}{'matrix product':>16}{'against fp32':>15}")
    for precision in Precision:
        rate, speedup = report.rates[precision], report.speedup(precision)
        if rate is None:
            print(f"{precision:<11}{'not available':>16}")
            continue
        remark = "  accelerated" if precision in report.accelerated else ""
        if speedup < 0.5:
            remark = f"  {1 / speedup:.0f} times slower: avoid it here"
        print(f"{precision:<11}{_flops(rate):>16}{speedup:>14.3g}x{remark}")

    if not report.trusted:
        print("\nThis machine is busy: the same product took 1.5 times as long in a second try.")
        print("Measure again when it is idle.")
    print(f"\nUse {report.recommended}: {report.why}.")
    for line in _recipe(report.recommended, report.device.type):
        print(f"    {line}")


def _train(options: argparse.Namespace) -> int:
    from amp_lab.training import run as runs

    def say(line: str) -> None:
        try:
            print(line, flush=True)
        except BrokenPipeError:  # whoever read along has seen enough, but the run goes on
            _print_no_more()

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


def _export(options: argparse.Namespace) -> None:
    from amp_lab.training import run as runs

    runs.export(options.run_folder, options.file)
    print(f"Written: {options.file}")


def _bench(options: argparse.Namespace) -> int:
    from pathlib import Path

    from amp_lab import plots
    from amp_lab.bench import NAMES, RUNGS, compare_results, load_results, run_bench
    from amp_lab.device import pick_device

    if options.list:
        print("workloads:", ", ".join(NAMES))
        print("\n".join(f"{rung:<15}{what}" for rung, what in RUNGS.items()))
        return 0
    out = Path(options.out)
    if out.suffix != ".json":
        raise BenchError(f"--out {options.out!r}: give a name that ends with .json")
    recorded = [load_results(path) for path in options.compare or []]  # before what takes minutes
    if options.results:
        measures = ("workload", "precision", "rung", "rounds", "quick", "peers")
        for name in measures:
            if getattr(options, name):
                raise BenchError(f"--{name} measures, and --results does not: leave one out")
        results, name = load_results(options.results), options.results
    else:
        name = options.out
        _check_writable(out, load_results)
        results = run_bench(
            pick_device(options.device),
            quick=options.quick,
            names=options.workload or (),
            precisions=options.precision or (),
            rungs=options.rung or (),
            rounds=options.rounds,
            peers=options.peers,
            say=lambda line: print(f"amp-lab bench: {line}", file=sys.stderr, flush=True),
            after_round=lambda so_far: so_far.save(out),
        )
        if not results.rows:
            raise KeyboardInterrupt  # before anything was timed: what is under the name stays
        results.save(out)
        ladder, roofline = out.with_suffix(".png"), out.with_name(f"{out.stem}-roofline.png")
        plots.save(ladder, plots.speed_ladder, results.ladder())
        plots.save(roofline, plots.roofline, *results.roofline())
    _show(results, options.format)
    if not options.results:
        print(f"\nWritten: {out}, {ladder}, {roofline}", file=sys.stderr)
    if recorded:
        compared = compare_results([results, *recorded], _short_names([name, *options.compare]))
        print()
        _show(compared, options.format)
        picture = out.with_name(f"{out.stem}-compared.png")
        plots.save(picture, plots.best_speedups, compared.best_speedups())
        print(f"\nWritten: {picture}", file=sys.stderr)
    return 0 if results.complete or options.results else 130


def _check_writable(out, load_results) -> None:
    """Raise `BenchError` if a result cannot be written, or would take the place of something else.

    Better now than after minutes.
    """
    if not out.exists():
        if not os.access(out.parent, os.W_OK):
            raise BenchError(f"{out}: cannot be written into the folder {str(out.parent)!r}")
        return
    try:
        load_results(out)
    except BenchError as error:
        raise BenchError(f"{error}; it is not overwritten: give another --out") from error


def _short_names(paths: list[str]) -> list[str]:
    """Names of files without their folders and endings, or the paths if two would be alike."""
    from pathlib import Path

    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else paths


def _show(result, form: str) -> None:
    """Print a result of the tools in the format asked for."""
    print({"table": str, "markdown": _as_markdown, "json": _as_json}[form](result))


def _as_markdown(result) -> str:
    return result.to_markdown()


def _as_json(result) -> str:
    return result.to_json()


def _ops(options: argparse.Namespace) -> None:
    from amp_lab.tracing.op_table import differences, op_table

    dtype = _dtype(options.dtype)
    table = op_table(options.device, dtype)
    if options.against:
        table = differences(table, op_table(options.against, dtype))
    _show(table, options.format)


def _xray(options: argparse.Namespace) -> None:
    import torch

    from amp_lab.cli.model_argument import load_model
    from amp_lab.tracing.xray import compare, xray

    sides = [(options.device, options.dtype)]
    if options.against is not None:
        sides.append(_other_side(options.against, *sides[0]))
    where = "cpu" if options.real else "meta"
    inputs = [torch.zeros(shape, dtype=dtype, device=where) for shape, dtype in _inputs(options)]
    model = load_model(options.target)
    found = [
        xray(model, *inputs, device_type=device, dtype=_dtype(name), real=options.real)
        for device, name in sides
    ]
    if options.against is None:
        _show(found[0], options.format)
        return
    if found[0].title == found[1].title:
        raise OptionError(
            f"--against {options.against!r} is the same again: give another device or dtype"
        )
    _show(compare(*found), options.format)


def _other_side(text: str, device: str, dtype: str | None) -> tuple[str, str | None]:
    """The device and dtype that `--against` names: ``mps``, ``bf16`` or ``cpu:bf16``."""
    first, colon, second = text.partition(":")
    if not colon:
        return (device, first) if first in _DTYPES else (first, dtype)
    if second not in _DTYPES:
        raise OptionError(
            f"--against {text!r}: give a device (cuda, xpu, mps, cpu), a dtype "
            f"({', '.join(_DTYPES)}), or both, as cpu:bf16"
        )
    return first, second


def _inputs(options: argparse.Namespace) -> list[tuple]:
    """Shape and dtype of each input."""
    import torch

    from amp_lab.cli.model_argument import parse_shape

    shapes = [parse_shape(text) for text in options.input]
    dtypes = options.input_dtype or ["float32"]
    if len(dtypes) not in (1, len(shapes)):
        raise OptionError(
            f"--input-dtype is given {len(dtypes)} times for {len(shapes)} --input: give it once, "
            "or once for each"
        )
    dtypes = [getattr(torch, name) for name in dtypes]
    return list(zip(shapes, dtypes * len(shapes) if len(dtypes) == 1 else dtypes, strict=True))


def _memory(options: argparse.Namespace) -> None:
    from amp_lab.cli.model_argument import load_model
    from amp_lab.tracing.memory import compare_memory

    shapes, dtypes = zip(*_inputs(options), strict=True)
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
    _show(table, options.format)


def _migrate(options: argparse.Namespace) -> int:
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


def _dtype(name: str | None):
    from amp_lab.precision import Precision

    return None if name is None else Precision(name).dtype


def _flops(rate: float) -> str:
    unit, factor = ("TFLOP/s", 1e-12) if rate >= 1e12 else ("GFLOP/s", 1e-9)
    return f"{rate * factor:.3g} {unit}"


def _recipe(precision: str, device_type: str) -> list[str]:
    """The lines of torch that turn this precision on."""
    return {
        "fp32": ["# nothing to do: fp32 is what tensors are made in"],
        "tf32": ['torch.backends.fp32_precision = "tf32"'],
        "fp16": [
            f'scaler = torch.amp.GradScaler("{device_type}")',
            f'with torch.autocast("{device_type}", dtype=torch.float16):',
            "    loss = criterion(model(inputs), targets)",
            "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
        ],
        "bf16": [
            f'with torch.autocast("{device_type}", dtype=torch.bfloat16):',
            "    loss = criterion(model(inputs), targets)",
            "loss.backward(); optimizer.step()",
        ],
    }[precision]
