"""Whether what a command is about to run fits into the memory that is there."""

import argparse
import contextlib

from amp_lab.cli.model_argument import GivenModel, given_model
from amp_lab.core.errors import OptionError, TraceError


def require_memory(
    options: argparse.Namespace,
    name: str | None,
    what: str,
    size: int | None = None,
    inference: bool = False,
) -> None:
    """Raise `OptionError` before the system ends a process that takes more memory than there is.

    `what` asks for a step of the model in `options` on the device of that name, or for a forward
    pass for inference, with a batch of `size` or the one given.
    """
    from amp_lab.core.device import memory_bytes, pick_device
    from amp_lab.core.report import bytes_text
    from amp_lab.tracing.memory import BatchedInputs

    device = pick_device(name)
    there = memory_bytes(device)
    needed = 0
    with (
        contextlib.suppress(TraceError),  # what can only be run for real is run
        given_model(options, with_values=False) as given,
    ):
        needed = _peak_bytes(given, device.type, inference)
        if size is not None:
            needed = needed * size // BatchedInputs(given.args, given.kwargs).batch
    if there is None or needed <= there:
        return
    sizes = f"{bytes_text(needed)}, and {device} has {bytes_text(there)}"
    run = "forward pass" if inference else "step"
    raise OptionError(f"{what}: a {run} needs about {sizes}")


def _peak_bytes(given: GivenModel, device_type: str, inference: bool) -> int:
    """What a step with SGD, or a forward pass for inference, is forecast to need in fp32."""
    from amp_lab.tracing.inference_memory import forecast_inference
    from amp_lab.tracing.memory import forecast_memory

    if inference:
        forecast = given.passed_to(forecast_inference, device_type=device_type, precision="fp32")
        return forecast.peak
    forecast = given.passed_to(
        forecast_memory,
        loss_fn=given.loss_fn,
        device_type=device_type,
        precision="fp32",
        optimizer="sgd",
    )
    return forecast.peak
