"""The names of torch's mixed precision: those of old, each with its device, and today's."""

HOMES = {  # each name, and the submodule of `amp` in which it is defined
    "autocast": "autocast_mode",
    "custom_fwd": "autocast_mode",
    "custom_bwd": "autocast_mode",
    "GradScaler": "grad_scaler",
}
OLD_MODULES = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}


def _old_names() -> dict[str, tuple[str, str]]:
    old_names = {}
    for module, device in OLD_MODULES.items():
        for name, home in HOMES.items():
            if device == "cpu" and name.startswith("custom"):  # torch.cpu.amp never had those
                continue
            old_names[f"{module}.{name}"] = (name, device)
            old_names[f"{module}.{home}.{name}"] = (name, device)
    return old_names


OLD = _old_names()
"""Each old dotted name, with today's name and its device."""
NEW = {f"torch.amp.{name}": name for name in HOMES} | {"torch.autocast": "autocast"}
NAMED = ("autocast", "GradScaler", "torch custom_fwd", "torch custom_bwd")
"""The triggers of a rule about these names: a file that has one of them has one of these texts."""
NEEDS = {"autocast": (1, 12), "GradScaler": (2, 3), "custom_fwd": (2, 4), "custom_bwd": (2, 4)}
"""The first torch that has today's names in torch.amp, by torch/amp/__init__.py of each version."""
