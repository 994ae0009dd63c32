"""`amp-lab doctor`: describe this machine, and recommend a precision."""

import argparse
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from amp_lab.core.device import DeviceReport


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    doctor = commands.add_parser(
        "doctor",
        help="describe this machine, and recommend a precision for it",
        description="Describe a device, measure which precisions it accelerates, and recommend "
        "one.",
    )
    device = (
        "device to describe: cpu, cuda, cuda:1, xpu or mps (default: AMP_LAB_DEVICE, else the "
        "accelerator, else cpu)"
    )
    doctor.add_argument("--device", metavar="NAME", help=device)
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Describe the device, measure it, and print the recommended precision."""
    import torch

    from amp_lab.core.cpu import NO_PRIMITIVE_REMEDY, lstm_remarks
    from amp_lab.core.device import describe_device, pick_device

    report = describe_device(pick_device(options.device))
    memory = ""
    if report.memory_bytes is not None:
        memory = f", {report.memory_bytes / 2**30:.1f} GiB of memory"
    print(f"{report.name} ({report.device}: {report.backend}){memory}")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    _print_rates(report)
    _print_values(report)
    if report.device.type == "cpu":
        for remark in lstm_remarks():
            print(f"{remark}: {NO_PRIMITIVE_REMEDY}.")

    if not report.trusted:  # the rates are shown all the same, with this warning
        print("\nThis machine is busy, so these rates are not reliable.")
        print("Measure again when it is idle.")
    print(f"\nUse {report.recommended}: {report.reason}.")
    recipe = "\n".join(_recipe(report.recommended, report.device.type))
    print(textwrap.indent(recipe, "    "))


def _print_rates(report: "DeviceReport") -> None:
    """A line for each precision: how fast a matmul is in it."""
    from amp_lab.core.precision import Precision
    from amp_lab.core.report import rate_text

    print(f"{'precision':<11}{'matmul':>16}{'against fp32':>15}")
    for precision in Precision:
        rate = report.rates[precision]
        if rate is None:
            print(f"{precision:<11}{'not available':>16}")  # TF32, where there are no tensor cores
            continue
        speedup = report.speedup(precision)
        remark = ""
        if speedup < 0.5:  # torch emulates it: in a real model a matmul may take minutes
            remark = f"  {1 / speedup:.0f} times slower: avoid it here"
        elif precision in report.accelerated:
            remark = "  accelerated"
        print(f"{precision:<11}{rate_text(rate, 'FLOP/s'):>16}{speedup:>14.3g}x{remark}")


def _print_values(report: "DeviceReport") -> None:
    """A line for each precision: what a matmul does to values in it."""
    print(f"\n{'precision':<11}{'bits of inputs':>16}{'error of a sum':>18}{'subnormals':>12}")
    for precision, values in report.values.items():
        if values is None:
            continue
        subnormals = "kept" if values.subnormals else "become 0"
        error = f"{values.error:.1f} ulp"
        print(f"{precision:<11}{values.input_bits:>16}{error:>18}{subnormals:>12}")
    matmul, convolution = report.fp32_bits_as_set
    kept = f"{matmul} bits of inputs in matmuls and {convolution} in convolutions"
    print(f"With torch's current settings, fp32 keeps {kept}.")


def _recipe(precision: str, device_type: str) -> list[str]:
    """The lines of torch that turn this precision on."""
    loss = "    loss = criterion(model(inputs), targets)"
    return {
        "fp32": ["# nothing to do: new tensors are fp32 by default"],
        # Convolutions use TF32 by default. Not `torch.backends.fp32_precision`, after which other
        # libraries, which read the older names, are refused an answer (pytorch #194680).
        "tf32": ['torch.set_float32_matmul_precision("high")'],
        "fp16": [
            f'scaler = torch.amp.GradScaler("{device_type}")',
            f'with torch.autocast("{device_type}", dtype=torch.float16):',
            loss,
            "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
        ],
        "bf16": [
            f'with torch.autocast("{device_type}", dtype=torch.bfloat16):',
            loss,
            "loss.backward(); optimizer.step()",
        ],
    }[precision]
