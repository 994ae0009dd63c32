"""The first cell of every notebook: picks the device and the scale.

A notebook imports it before `amp_lab`, since it adds the checkout's `src` to the path if `amp_lab`
is not installed.
"""

import contextlib
import datetime
import enum
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch

if importlib.util.find_spec("amp_lab") is None:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))

from amp_lab.core.cpu import onednn_has_bf16
from amp_lab.core.device import pick_device
from amp_lab.core.device_facts import backend_name, device_name
from amp_lab.core.errors import AmpLabError, OptionError
from amp_lab.core.requirements import require_torch
from amp_lab.core.torch_versions import other_gpus_left_alone

_BLOCKS = contextlib.ExitStack()  # entered at the start of a notebook, and never left


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
        is_cpu = device.type == "cpu"
        return Scale.QUICK if is_cpu else Scale.FULL
    if name not in list(Scale):
        raise OptionError(f"AMP_LAB_SCALE={name!r} is not a scale; use 'quick' or 'full'")
    return Scale(name)


def emulates_bf16(device: torch.device) -> bool:
    """Whether `device` is a CPU without instructions for bf16, as most without AVX-512 are.

    Matmuls in bf16 run there at about a hundredth of fp32's rate.
    """
    return device.type == "cpu" and not onednn_has_bf16()


def start(*packages: str) -> tuple[torch.device, Scale]:
    """Pick device and scale for a notebook, by `pick_device` and `pick_scale`.

    It prints where the outputs of the notebook come from: device, torch, date, and the commit of
    this checkout. `packages` are the modules that this notebook needs besides those that all need;
    they are only looked for, and not imported.

    A missing package, or a wrong AMP_LAB_DEVICE or AMP_LAB_SCALE, ends a plain script with one line
    on stderr and exit code 2; in Jupyter it is the cell's error.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    try:
        if missing:
            raise OptionError(
                f"this notebook needs {' and '.join(missing)}: run `pdm sync` to install what the "
                "notebooks need"
            )
        require_torch()
        device = pick_device()
        scale = pick_scale(device)
    except AmpLabError as error:
        if "ipykernel" in sys.modules:  # in Jupyter
            raise
        print(error, file=sys.stderr)
        sys.exit(2)
    _BLOCKS.enter_context(other_gpus_left_alone())  # for the fake tensors of the notebooks
    environment = [device_name(device), backend_name(device), f"torch {torch.__version__}"]
    today = datetime.date.today().isoformat()
    print(", ".join([*environment, f"{scale} scale", today, *_commit()]))
    if emulates_bf16(device):
        print(
            "This CPU has no instructions for bf16, so bf16 is slow here. Some sizes are smaller."
        )
    return device, scale


def _commit() -> list[str]:
    """The commit of this checkout, as ``["commit 1a2b3c4+"]``: a plus stands for changed files.

    Empty without git or a repository.
    """
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        # Only Python files, since notebooks (.ipynb) change while they are built.
        changes = _git("status", "--porcelain", "-uno", ":/*.py")
    except (OSError, subprocess.CalledProcessError):
        return []
    if changes:
        commit += "+"
    return [f"commit {commit}"]


def _git(*arguments: str) -> str:
    """Run git in the repository of this file, and return what it prints."""
    folder = Path(__file__).parent
    process = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return process.stdout.strip()
