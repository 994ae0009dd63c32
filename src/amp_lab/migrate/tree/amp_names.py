"""The names of torch's mixed precision: the deprecated ones with their device, and today's."""

from typing import NamedTuple

SUBMODULES = {  # each name with the submodule of `torch.amp` that defines it
    "autocast": "autocast_mode",
    "custom_fwd": "autocast_mode",
    "custom_bwd": "autocast_mode",
    "GradScaler": "grad_scaler",
}
OLD_MODULES = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}


class Replacement(NamedTuple):
    """Today's form of an old name: ``torch.amp.<name>``, with a device."""

    name: str
    device: str


def _old_names() -> dict[str, Replacement]:
    """The table `OLD_NAMES`: each name in its old module, and in that module's submodule."""
    old_names = {}
    for module, device in OLD_MODULES.items():
        for name, submodule in SUBMODULES.items():
            if device == "cpu" and name.startswith("custom"):  # torch.cpu.amp never had those
                continue
            replacement = Replacement(name, device)
            old_names[f"{module}.{name}"] = replacement
            old_names[f"{module}.{submodule}.{name}"] = replacement
    return old_names


OLD_NAMES = _old_names()
"""Each old dotted name, such as ``torch.cuda.amp.autocast``, with its replacement."""
NEW_NAMES = {f"torch.amp.{name}": name for name in SUBMODULES} | {"torch.autocast": "autocast"}
"""Each of today's dotted names, such as ``torch.amp.autocast``, with its last part."""
TRIGGER_TEXTS = ("autocast", "GradScaler", "torch custom_fwd", "torch custom_bwd")
"""The triggers of a rule about these names: a file that uses one has one of these texts."""
_SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
_AUTOCAST = ("device_type", "dtype", "enabled", "cache_enabled")
OLD_AUTOCAST = ("enabled", "dtype", "cache_enabled")
"""The parameters of the old autocasts, in their order."""


def _parameters(name: str, old: tuple[str, ...], new: tuple[str, ...]) -> dict[str, tuple]:
    """The parameters of a class, by each of its dotted names: old ones, and today's."""
    today = (f"torch.amp.{name}", f"torch.amp.{SUBMODULES[name]}.{name}")
    old_names = [dotted for dotted, replacement in OLD_NAMES.items() if replacement.name == name]
    return dict.fromkeys(old_names, old) | dict.fromkeys(today, new)


SCALERS = _parameters("GradScaler", _SCALER, ("device", *_SCALER))
"""The parameters of each class of scalers, by its dotted name."""
AUTOCASTS = _parameters("autocast", OLD_AUTOCAST, _AUTOCAST) | {"torch.autocast": _AUTOCAST}
"""The parameters of each class of autocasts, by its dotted name."""
FIRST_TORCH = {
    "autocast": (1, 12),
    "GradScaler": (2, 3),
    "custom_fwd": (2, 4),
    "custom_bwd": (2, 4),
}
"""The first torch that has each name in torch.amp; source: its torch/amp/__init__.py."""
