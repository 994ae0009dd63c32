"""`amp-lab bench`: time training and inference in each precision."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from amp_lab.cli.printing import add_format, require_output, say_aside, show
from amp_lab.core.errors import OptionError
from amp_lab.core.requirements import require_matplotlib

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from amp_lab.bench.results import Results


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    bench = commands.add_parser(
        "bench",
        help="time training and inference in each precision, next to the device's peak rate",
        description="Time workloads in each precision: first in eager mode, then with one "
        "optimization after the other. The command prints a table, writes the results to a JSON "
        "file, and draws pictures next to that file.",
    )
    option = bench.add_argument
    workload = "workload to time; repeat the option for several (default: all)"
    option("--workload", action="append", metavar="NAME", help=workload)
    precision = (
        "precision to time: fp32, tf32, fp16 or bf16; repeat the option for several (default: "
        "fp32, and all that the device accelerates)"
    )
    option("--precision", action="append", metavar="NAME", help=precision)
    rung = "optimization to time (see --list); repeat the option for several (default: all)"
    option("--rung", action="append", metavar="NAME", help=rung)
    option("--list", action="store_true", help="print the names of workloads and rungs, and stop")
    option("--quick", action="store_true", help="measure small sizes, in about 3 minutes")
    rounds = (
        "number of rounds to time (default: as many as a trusted result needs, at most 24; at most "
        "18 with --quick)"
    )
    option("--rounds", type=int, metavar="N", help=rounds)
    device = "device to measure (default: AMP_LAB_DEVICE, else the accelerator, else cpu)"
    option("--device", metavar="NAME", help=device)
    out = "JSON file to write; the pictures go to the same folder (default: bench.json)"
    option("--out", default="bench.json", metavar="FILE", help=out)
    option("--compare", nargs="+", metavar="FILE", help="compare with the results in these files")
    option("--results", metavar="FILE", help="show the results in this file instead of measuring")
    add_format(bench)
    bench.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure or read results, print them, and draw them; return the exit code.

    The exit code is 130 if the user interrupted the measurement after the first timing.
    """
    from amp_lab import bench

    if options.list:
        print("workloads:", ", ".join(bench.WORKLOADS))
        for rung in bench.RUNGS:
            print(f"{rung.name:<15}{rung.description}")
        return 0
    out = Path(options.out)
    if out.suffix != ".json":
        raise OptionError(f"--out {options.out!r}: give a name that ends with .json")
    # Read before minutes of measuring, so that an unreadable file is found now.
    other_results = [bench.load_results(path) for path in options.compare or []]
    if other_results or not options.results:
        require_matplotlib("bench")
    if other_results:
        require_output(_pictures(out).compared)
    if options.results:
        results = _read_results(options)
    else:
        results = _measure(options, out)
    show(results, options.format)  # before the pictures, which take seconds
    if not options.results:
        _draw_pictures(results, out)
    if other_results:
        _compare([results, *other_results], options, out)
    if results.complete or options.results:
        return 0
    return 130  # as a shell counts Ctrl-C


def _read_results(options: argparse.Namespace) -> "Results":
    """Read the file of --results. Raises `OptionError` if an option for measuring is given too."""
    from amp_lab.bench import load_results

    for name in ("workload", "precision", "rung", "rounds", "quick"):
        if getattr(options, name):
            raise OptionError(
                f"--{name} is for measuring, and --results reads a file: leave one out"
            )
    return load_results(options.results)


def _measure(options: argparse.Namespace, out: Path) -> "Results":
    """Measure, write the results to `out`, and return them.

    Raises `KeyboardInterrupt` if the user interrupted before anything was timed.
    """
    from amp_lab.bench import run_bench
    from amp_lab.core.device import pick_device

    _require_outputs(out)  # fail now, and not after minutes

    def say(line: str) -> None:
        say_aside(f"amp-lab bench: {line}")

    def save(results_so_far: "Results") -> None:
        results_so_far.save(out)

    results = run_bench(
        pick_device(options.device),
        quick=options.quick,
        names=options.workload or (),
        precisions=options.precision or (),
        rungs=options.rung or (),
        rounds=options.rounds,  # None: what suits a quick or a full run
        say=say,
        after_round=save,
    )
    if not results.rows:
        raise KeyboardInterrupt  # an older file of that name is left as it is
    results.save(out)  # once more: `save` is not called after a round that was interrupted
    return results


def _require_outputs(out: Path) -> None:
    """Raise `OptionError` if the results or a picture cannot be written.

    That includes a file that is there and was not written by `amp-lab bench`.
    """
    from amp_lab.bench import load_results

    require_output(out, ours=True)  # a file that is there is checked below
    pictures = _pictures(out)
    require_output(pictures.ladder)
    require_output(pictures.roofline)
    if not out.exists():
        return
    try:
        load_results(out)
    except OptionError as error:
        raise OptionError(
            f"{error}; bench does not overwrite this file: give another --out"
        ) from error


class _Pictures(NamedTuple):
    """The paths of the pictures, which are written beside the results."""

    ladder: Path
    roofline: Path
    compared: Path


def _pictures(out: Path) -> _Pictures:
    """The paths of the pictures beside the results in `out`."""
    return _Pictures(
        ladder=out.with_name(f"{out.stem}.png"),
        roofline=out.with_name(f"{out.stem}-roofline.png"),
        compared=out.with_name(f"{out.stem}-compared.png"),
    )


def _draw_pictures(results: "Results", out: Path) -> None:
    """Draw the two pictures of a result beside its file `out`."""
    from amp_lab import plots

    pictures = _pictures(out)
    plots.save(pictures.ladder, plots.speed_ladder, results.ladder())
    plots.save(pictures.roofline, plots.roofline, *results.roofline())
    say_aside(f"\nWritten: {out}, {pictures.ladder}, {pictures.roofline}")


def _compare(results: list["Results"], options: argparse.Namespace, out: Path) -> None:
    """Print the first of these results beside the others, and draw the best speed-ups of each.

    The first is this run's, or that of --results; the others are those of --compare.
    """
    from amp_lab import plots
    from amp_lab.bench import BenchComparison

    paths = [options.results or options.out, *options.compare]
    names = [Path(path).stem for path in paths]
    if len(set(names)) < len(names):  # two files in different folders have the same name
        names = paths
    comparison = BenchComparison(results, names)
    print()
    show(comparison, options.format)
    picture = _pictures(out).compared
    plots.save(picture, plots.best_speedups, comparison.best_speedups())
    say_aside(f"\nWritten: {picture}")
