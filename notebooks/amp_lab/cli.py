"""The command line, `amp-lab …`: the one module that prints for a person and exits."""

import argparse
import os
import sys

from amp_lab import __version__
from amp_lab.errors import AmpLabError

# torch takes seconds to load, so the commands import it, not this module: --help answers at once.


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):  # the usage above it would bury the one line that matters
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run `amp-lab` with these arguments; return its exit code: 0, or 2 for a user's mistake."""
    options = _parser().parse_args(argv)
    try:
        options.run(options)
        sys.stdout.flush()
    except AmpLabError as error:
        print(f"amp-lab {options.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        remedy = "run `pdm run sync`, or on AMD see the README"
        print(f"amp-lab {options.command}: torch is not installed; {remedy}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


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
    return parser


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
