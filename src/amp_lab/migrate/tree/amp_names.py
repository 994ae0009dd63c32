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
FIRST_TORCH = {
    "autocast": (1, 12),
    "GradScaler": (2, 3),
    "custom_fwd": (2, 4),
    "custom_bwd": (2, 4),
}
"""The first torch that has each name in torch.amp; source: its torch/amp/__init__.py."""
