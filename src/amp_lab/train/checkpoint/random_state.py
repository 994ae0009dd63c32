"""Saves and restores the random generators, so that a resumed run draws the same numbers."""

import random

import numpy as np
import torch

from amp_lab.core.backends import backend


def random_states(device: torch.device | str = "cpu") -> dict:
    """Return the states of the generators of Python, NumPy, torch and the device, for a checkpoint.

    The keys are "python", "numpy", "torch" and, except for a CPU, the type of the device.
    """
    device = torch.device(device)
    algorithm, keys, *others = np.random.get_state()
    key_list = np.asarray(keys).tolist()  # `torch.load` with `weights_only` refuses an array
    states = {
        "python": random.getstate(),
        "numpy": (algorithm, key_list, *others),
        "torch": torch.get_rng_state(),
    }
    if backend(device).is_host:  # the CPU's generator is the one under "torch"
        return states
    module = torch.get_device_module(device)
    states[device.type] = module.get_rng_state(*_device_arguments(device))
    return states


def restore_random_states(states: dict, device: torch.device | str = "cpu") -> None:
    """Restore the states that `random_states` returned.

    If the states were saved on another type of device, the generator of `device` is not changed.
    """
    device = torch.device(device)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type in states:
        module = torch.get_device_module(device)
        module.set_rng_state(states[device.type], *_device_arguments(device))


def _device_arguments(device: torch.device) -> tuple[torch.device, ...]:
    """The arguments that select a device for `get_rng_state`; empty for backends that take none."""
    if not backend(device).rng_takes_index:
        return ()
    return (device,)
