"""Whether what a command is about to run fits into the memory that is there."""

import argparse
import contextlib

from amp_lab.cli.model_argument import given_model
from amp_lab.errors import OptionError, TraceError


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
    from amp_lab.device import memory_bytes, pick_device
    from amp_lab.report import bytes_text
    from amp_lab.tracing.inference_memory import forecast_inference
    from amp_lab.tracing.memory import BatchedInputs, forecast_memory

    device = pick_device(name)
    there, needed = memory_bytes(device), 0
    with (
        contextlib.suppress(TraceError),  # what can only be run for real is run
        given_model(options, with_values=False) as given,
    ):
        how = {"device_type": device.type, "precision": "fp32"}
        if inference:
            needed = given.passed_to(forecast_inference, **how).peak
        else:
            how["optimizer"] = "sgd"
            needed = given.passed_to(forecast_memory, loss_fn=given.loss_fn, **how).peak
        if size is not None:
            needed = needed * size // BatchedInputs(given.args, given.kwargs).batch
    if there is not None and needed > there:
        sizes = f"{bytes_text(needed)}, and {device} has {bytes_text(there)}"
        run = "forward pass" if inference else "step"
        raise OptionError(f"{what}: a {run} needs about {sizes}")
