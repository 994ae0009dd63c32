"""The tools of the AMP Lab notebooks, for your model and your device.

    from amp_lab import Precision, describe_device, measure, pick_device

`import amp_lab` is fast, because it does not load torch. The first use of a name loads torch.
"""

import importlib
import sys
from typing import Any

__version__ = "0.2.0"

_EXPORTS = {  # public name: the module that defines it
    "AmpLabError": "core.errors",
    "AmpLabWarning": "core.errors",
    "DeviceError": "core.errors",
    "Precision": "core.precision",
    "DeviceReport": "core.device",
    "describe_device": "core.device",
    "pick_device": "core.device",
    "recommend_precision": "core.device",
    "Measurement": "core.timing_result",
    "measure": "core.timing",
    "Comparison": "core.timing_result",
    "compare": "core.timing",
    "OpRule": "tracing.op_table",
    "op_table": "tracing.op_table",
    "Xray": "tracing.xray_result",
    "xray": "tracing.xray",
    "xray_sharding": "tracing.sharding",
    "MemoryForecast": "tracing.memory_result",
    "forecast_inference": "tracing.inference_memory",
    "forecast_memory": "tracing.memory",
    "largest_batch": "tracing.memory",
    "advise": "advisor",
    "explain": "failures",
    "first_difference": "difference",
    "rehearse": "formats.rehearsal",
    "UnderflowReport": "numerics",
    "gradient_underflow": "numerics",
    "ScaleLog": "numerics",
    "NonfiniteReport": "numerics",
    "find_nonfinite": "numerics",
    "load_dataset": "train.data",
    "make_stand_in": "train.data.generated",
    "fit": "train.loop",
    "evaluate": "train.loop",
    "save_checkpoint": "train.checkpoint.file",
    "load_checkpoint": "train.checkpoint.file",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from amp_lab.core.requirements import needed_for, require_torch

    if _EXPORTS[name] not in ("core.errors", "failures"):  # which do without torch
        require_torch()
    with needed_for(f"{__name__}.{name}"):
        value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
