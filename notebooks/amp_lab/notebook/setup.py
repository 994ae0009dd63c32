"""The set-up cell that every notebook starts with: on which device, and at which scale."""

import enum
import importlib.util
import os
import sys

import torch

from amp_lab.device import pick_device
from amp_lab.errors import AmpLabError, OptionError


class Scale(enum.StrEnum):
    """How much a notebook computes."""

    QUICK = "quick"
    """Small enough for a CPU: a minute a notebook."""
    FULL = "full"
    """The problem in its real size, for a GPU."""


def pick_scale(device: torch.device) -> Scale:
    """The scale that AMP_LAB_SCALE in the environment names; else full on a GPU, quick on a CPU.

    Raises `OptionError` for any other name.
    """
    name = os.environ.get("AMP_LAB_SCALE")
    if not name:
        return Scale.QUICK if device.type == "cpu" else Scale.FULL
    if name not in list(Scale):
        raise OptionError(
            f"AMP_LAB_SCALE={name!r} is not a scale; use {' or '.join(map(repr, map(str, Scale)))}"
        )
    return Scale(name)


def start(*packages: str) -> tuple[torch.device, Scale]:
    """Device and scale for a notebook, chosen by `pick_device` and `pick_scale`.

    `packages` are those that it needs besides what all notebooks need, by the names of their
    modules; they are not imported.

    One that is not installed, or a wrong AMP_LAB_DEVICE or AMP_LAB_SCALE, ends a plain script with
    one line on stderr and exit code 2; in Jupyter the same line is the cell's error.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    try:
        if missing:
            raise OptionError(
                f"this notebook needs {' and '.join(missing)}, not installed here; `pdm sync` "
                "installs all that the notebooks need"
            )
        device = pick_device()
        return device, pick_scale(device)
    except AmpLabError as error:
        if "ipykernel" in sys.modules:
            raise
        print(error, file=sys.stderr)
        sys.exit(2)
