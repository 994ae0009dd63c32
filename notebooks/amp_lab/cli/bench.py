"""`amp-lab bench`: time training and inference in each precision."""

import argparse
import os
import sys

from amp_lab.cli.printing import FORMAT, show
from amp_lab.errors import OptionError


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
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
    bench.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure or read results, print them, and draw them."""
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
        raise OptionError(f"--out {options.out!r}: give a name that ends with .json")
    recorded = [load_results(path) for path in options.compare or []]  # before what takes minutes
    if options.results:
        measures = ("workload", "precision", "rung", "rounds", "quick")
        for name in measures:
            if getattr(options, name):
                raise OptionError(f"--{name} measures, and --results does not: leave one out")
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
            say=lambda line: print(f"amp-lab bench: {line}", file=sys.stderr, flush=True),
            after_round=lambda so_far: so_far.save(out),
        )
        if not results.rows:
            raise KeyboardInterrupt  # before anything was timed: what is under the name stays
        results.save(out)
        ladder, roofline = out.with_suffix(".png"), out.with_name(f"{out.stem}-roofline.png")
        plots.save(ladder, plots.speed_ladder, results.ladder())
        plots.save(roofline, plots.roofline, *results.roofline())
    show(results, options.format)
    if not options.results:
        print(f"\nWritten: {out}, {ladder}, {roofline}", file=sys.stderr)
    if recorded:
        compared = compare_results([results, *recorded], _short_names([name, *options.compare]))
        print()
        show(compared, options.format)
        picture = out.with_name(f"{out.stem}-compared.png")
        plots.save(picture, plots.best_speedups, compared.best_speedups())
        print(f"\nWritten: {picture}", file=sys.stderr)
    return 0 if results.complete or options.results else 130


def _check_writable(out, load_results) -> None:
    """Raise `OptionError` if a result cannot be written, or would take the place of something else.

    Better now than after minutes.
    """
    if not out.exists():
        if not os.access(out.parent, os.W_OK):
            raise OptionError(f"{out}: cannot be written into the folder {str(out.parent)!r}")
        return
    try:
        load_results(out)
    except OptionError as error:
        raise OptionError(f"{error}; it is not overwritten: give another --out") from error


def _short_names(paths: list[str]) -> list[str]:
    """Names of files without their folders and endings, or the paths if two would be alike."""
    from pathlib import Path

    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else paths
