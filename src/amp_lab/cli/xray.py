"""`amp-lab xray`: show the dtypes of a model under autocast."""

import argparse
from typing import TYPE_CHECKING

from amp_lab.cli.memory_check import require_memory
from amp_lab.cli.model_argument import (
    DTYPE_NAMES,
    LoadedModel,
    add_absent_device,
    add_model,
    dtype_of,
    load_model,
    other_side,
    trace_model,
    use_absent_device,
)
from amp_lab.cli.printing import show
from amp_lab.core.errors import OptionError

if TYPE_CHECKING:
    from amp_lab.tracing.xray_result import Xray


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    xray = commands.add_parser(
        "xray",
        help="show the dtype of each op of your model under autocast, on any device",
        description="Print the dtypes of a model's ops under autocast, with advice. Usually the "
        "command computes no values, so you do not need the device.",
    )
    add_model(xray)
    add_absent_device(xray)
    option = xray.add_argument
    option(
        "--dtype",
        choices=DTYPE_NAMES,
        help="dtype of autocast; fp32 turns autocast off (default: the backend's default)",
    )
    against = (
        "print only the ops that differ on another device (mps), in another dtype (bf16), or in "
        "both (cpu:bf16)"
    )
    option("--against", metavar="OTHER", help=against)
    option(
        "--real",
        action="store_true",
        help="run the model on the device, which must be in this machine",
    )
    depth = "print the output and the parameters of each module, N levels deep"
    option("--depth", type=_depth, metavar="N", help=depth)
    parallel = "print the dtypes of each parameter under DDP or FSDP2"
    option("--parallel", choices=("ddp", "fsdp"), help=parallel)
    precision = (
        "with --parallel: precision (default: bf16; the policy of a model that calls fully_shard; "
        "fp32 for a model that is already in DDP)"
    )
    option("--precision", choices=DTYPE_NAMES, help=precision)
    reduce_dtype = "with --parallel: dtype in which gradients are summed (default: fp32)"
    option("--reduce-dtype", choices=DTYPE_NAMES, help=reduce_dtype)
    xray.set_defaults(run=run)


def _depth(text: str) -> int:
    """The number of levels that --depth gives."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of 1 or more")
    return int(text)


def run(options: argparse.Namespace) -> None:
    """X-ray the model, and print the result."""
    from amp_lab.tracing import compare_xrays
    from amp_lab.tracing.xray import xray_call

    use_absent_device(options)
    if options.parallel is not None:
        _run_sharded(options)
        return
    sides = _sides(options)
    if options.real:
        require_memory(options, options.device, "--real")

    def trace(loaded: LoadedModel) -> "list[Xray]":
        return [
            xray_call(loaded.call, device, dtype_of(name), options.real) for device, name in sides
        ]

    result, *others = trace_model(options, trace, with_values=options.real)
    if others:
        (other,) = others  # at most one, that of --against
        if result.title == other.title:
            same = f"--against {options.against!r} has the same device and dtype"
            raise OptionError(f"{same}: give another one")
        show(compare_xrays(result, other), options.format)
    elif options.depth is not None:
        show(result.by_module(options.depth), options.format)
    else:
        show(result, options.format)


def _sides(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """The device and dtype to X-ray in, and with --against a second pair, to compare with.

    A dtype is a name such as ``bf16``, or None for the backend's own. Raises `OptionError` for
    options that do not go together.
    """
    if options.precision or options.reduce_dtype:
        raise OptionError(
            "--precision and --reduce-dtype need --parallel; for autocast give --dtype"
        )
    side = (options.device, options.dtype)
    if options.against is None:
        return [side]
    if options.depth is not None:
        raise OptionError("--depth and --against cannot be combined: leave one out")
    return [side, other_side(options.against, *side)]


def _run_sharded(options: argparse.Namespace) -> None:
    """Print the dtypes of each parameter under DDP or FSDP2, with advice.

    Raises `OptionError` with an option that is for autocast alone.
    """
    if options.dtype or options.against or options.real or options.depth:
        others = "--dtype, --against, --real or --depth"
        raise OptionError(
            f"--parallel cannot be combined with {others}; give the dtype with --precision"
        )
    from amp_lab.tracing.sharded_step import group_of
    from amp_lab.tracing.sharding import parallel_of, xray_sharding

    # A group for a TARGET that calls fully_shard itself; no other process is needed.
    with group_of(ranks=2), load_model(options, with_values=False) as loaded:
        call = loaded.call
        parallel = options.parallel
        if parallel_of(call.model) == parallel:  # the target has sharded the model itself
            parallel = None
        result = xray_sharding(
            call.model,
            *call.args,
            parallel=parallel,
            device_type=options.device,
            precision=options.precision,
            reduce_dtype=options.reduce_dtype,
            **call.kwargs,
        )
    show(result, options.format)
