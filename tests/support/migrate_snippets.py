"""The examples of old code in tests/migrate/snippets, and how to run one."""

import re
from pathlib import Path

import torch

SNIPPETS = Path(__file__).parents[1] / "migrate" / "snippets"


def snippets(name: str) -> dict[str, str]:
    """The examples of a file, by their titles."""
    text = (SNIPPETS / f"{name}.txt").read_text()
    parts = re.split(r"^=== (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def state() -> tuple:
    """The autocast state of this thread."""
    devices = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cuda", "cpu")
    ]
    return *devices, torch.is_autocast_cache_enabled()


def settings(scaler: torch.amp.GradScaler) -> tuple:
    """What a scaler was made with."""
    return isinstance(scaler, torch.amp.GradScaler), scaler._device, scaler.state_dict()


def plain(value: object) -> object:
    """The value with each tensor as its dtype and numbers, which compare bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def run(code: str) -> object:
    """What a snippet leaves in `result`."""
    names = {"state": state, "settings": settings, "__name__": "snippet"}
    exec(compile(code, "snippet", "exec"), names)
    return plain(names["result"])
