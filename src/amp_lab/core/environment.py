"""Where and when a run took place: the facts that every recorded result states."""

import datetime
import platform

import torch

from amp_lab.core.device import DeviceReport


def environment_of(report: DeviceReport) -> dict[str, str | int]:
    """The device, the software and the date of a run, for JSON.

    `amp-lab bench` and the tools in ``tools/measure/`` write these facts, and each adds what it
    alone knows, such as its number of rounds.
    """
    return {
        "device": report.name,
        "backend": report.backend,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }
