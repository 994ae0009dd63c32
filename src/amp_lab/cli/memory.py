"""`amp-lab memory`: forecast the memory of a training step, or of inference."""

import argparse
import dataclasses

from amp_lab.cli.model_argument import (
    LoadedModel,
    add_absent_device,
    add_model,
    trace_model,
    use_absent_device,
)
from amp_lab.cli.printing import show
from amp_lab.core.errors import OptionError
from amp_lab.core.optimizers import OPTIMIZERS

_MOST_TOKENS = 10**9


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    memory = commands.add_parser(
        "memory",
        help="forecast the memory that training or inference needs, on any device",
        description="Forecast the memory of a training step in each precision. With --for or "
        "--memory, the table shows whether it fits, and the largest batch that fits. With --eval, "
        "forecast a forward pass under inference_mode: with autocast, with weights cast once, and "
        "with weights in int8 and int4. If the model returns a KV cache, the table includes it.",
    )
    add_model(memory)
    option = memory.add_argument
    precisions = (
        "precision to forecast: fp32, tf32, fp16 or bf16; repeat the option for several (default: "
        "fp32 and bf16; without --eval, fp16 too)"
    )
    reserve = "percent of the memory to leave free for the driver and fragmentation (default: 10)"
    add_absent_device(memory)
    budget = "memory budget, such as 24GiB (default: the memory of the GPU given by --for)"
    option("--memory", metavar="SIZE", help=budget)
    option("--reserve", type=_share, default=0.1, metavar="PERCENT", help=reserve)
    option("--precision", action="append", metavar="NAME", help=precisions)
    optimizers = f"optimizer of the step: one of {', '.join(OPTIMIZERS)} (default: adam)"
    option("--optimizer", metavar="NAME", help=optimizers)
    ranks = "number of FSDP2 ranks that share weights, gradients and optimizer state (default: 1)"
    option("--fsdp-ranks", type=int, metavar="N", help=ranks)
    tokens = "with --eval: forecast the KV cache for sequences of N tokens"
    option("--tokens", type=_tokens, metavar="N", help=tokens)
    memory.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Forecast, and print the table."""
    use_absent_device(options)
    if options.eval:
        _run_inference(options)
    else:
        _run_training(options)


def _run_inference(options: argparse.Namespace) -> None:
    """Print the forecast of a forward pass. Raises `OptionError` with an option of training."""
    from amp_lab.tracing.inference_memory import InferenceTable, inference_table

    for name in ("optimizer", "fsdp_ranks"):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} is for training, and --eval for inference: leave one out")

    def trace(loaded: LoadedModel) -> InferenceTable:
        return inference_table(
            loaded.call,
            memory_bytes=options.memory,
            reserve=options.reserve,
            device_type=options.device,
            tokens=options.tokens,
            **_precisions(options),
        )

    show(trace_model(options, trace), options.format)


def _run_training(options: argparse.Namespace) -> None:
    """Print the forecast of a training step. Raises `OptionError` with an option of inference."""
    from amp_lab.tracing.memory import memory_table
    from amp_lab.tracing.memory_result import MemoryTable

    if options.tokens is not None:
        raise OptionError(
            "--tokens is for the KV cache of inference: add --eval, or leave out --tokens"
        )

    def trace(loaded: LoadedModel) -> MemoryTable:
        table = memory_table(
            loaded.call,
            memory_bytes=options.memory,
            reserve=options.reserve,
            device_type=options.device,
            optimizer=options.optimizer or "adam",
            fsdp_ranks=1 if options.fsdp_ranks is None else options.fsdp_ranks,
            **_precisions(options),
        )
        if loaded.call.loss_fn is not None:
            return table
        return dataclasses.replace(table, loss_left_out=loaded.observer.loss_left_out)

    show(trace_model(options, trace), options.format)


def _precisions(options: argparse.Namespace) -> dict[str, list[str]]:
    """The keyword ``precisions``, if the option is given; else none, so that the default holds."""
    if not options.precision:
        return {}
    return {"precisions": options.precision}


def _share(text: str) -> float:
    """The share that a percentage such as ``10`` or ``10%`` is: 0.1."""
    percent = float(text.strip().removesuffix("%"))  # argparse says what is wrong with other text
    if not 0 <= percent < 100:
        raise argparse.ArgumentTypeError(f"{text!r}: give a percentage from 0 to below 100")
    return percent / 100


def _tokens(text: str) -> int:
    """The number of tokens that --tokens gives."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= _MOST_TOKENS:
        what = f"a whole number of tokens from 1 to {_MOST_TOKENS:,}, such as 8192"
        raise argparse.ArgumentTypeError(f"{text!r}: give {what}")
    return count
