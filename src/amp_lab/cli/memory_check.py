"""Refuse a run that would need more memory than the device has."""

import argparse
import contextlib
from typing import TYPE_CHECKING

from amp_lab.cli.model_argument import load_model
from amp_lab.core.errors import OptionError, TraceError

if TYPE_CHECKING:
    from amp_lab.model_call import ModelCall


def require_memory(
    options: argparse.Namespace,
    name: str | None,
    what: str,
    size: int | None = None,
    inference: bool = False,
) -> None:
    """Raise `OptionError` if a step is forecast to need more memory than the device has.

    Linux would kill the process in such a step. If the model cannot be traced, there is no
    forecast, and the function does not raise.

    Args:
        options: The options of the command, which name the model and its inputs.
        name: The name of the device; None is the default device.
        what: The command or option that runs the step: the message begins with it.
        size: The batch size, if it is not that of the inputs.
        inference: Whether the step is a forward pass alone.
    """
    from amp_lab.core.device import pick_device
    from amp_lab.core.device_facts import memory_bytes
    from amp_lab.core.report import bytes_text

    device = pick_device(name)
    available = memory_bytes(device)
    needed = 0  # bytes; stays 0 if the model cannot be traced
    with (
        contextlib.suppress(TraceError),  # a model that cannot be traced is run without a check
        load_model(options, with_values=False) as loaded,
    ):
        needed = _peak_bytes(loaded.call, device.type, inference)
        if size is not None:  # memory grows with the batch, roughly
            needed = needed * size // loaded.call.batch
    if available is None or needed <= available:
        return
    sizes = f"{bytes_text(needed)}, but {device} has {bytes_text(available)}"
    run = "forward pass" if inference else "step"
    raise OptionError(f"{what}: a {run} needs about {sizes}; try a smaller batch or model")


def _peak_bytes(call: "ModelCall", device_type: str, inference: bool) -> int:
    """The forecast peak in bytes, in fp32: of a step with SGD, or of a forward pass."""
    from amp_lab.tracing.inference_memory import forecast_inference
    from amp_lab.tracing.memory import forecast_memory

    if inference:
        return forecast_inference(
            call.model, *call.args, device_type=device_type, precision="fp32", **call.kwargs
        ).peak
    return forecast_memory(
        call.model,
        *call.args,
        loss_fn=call.loss_fn,
        device_type=device_type,
        precision="fp32",
        optimizer="sgd",
        **call.kwargs,
    ).peak
