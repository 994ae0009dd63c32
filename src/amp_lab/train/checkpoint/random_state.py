"""The state of every random generator, so that what goes on draws the same numbers."""

import random

import numpy as np
import torch

from amp_lab.core.backends import backend


def random_states(device: torch.device | str = "cpu") -> dict:
    """The states of Python's, NumPy's, torch's and the device's generator, for a checkpoint."""
    device = torch.device(device)
    algorithm, keys, *others = np.random.get_state()
    key_list = np.asarray(keys).tolist()  # the restricted unpickler would refuse an array
    states = {
        "python": random.getstate(),
        "numpy": (algorithm, key_list, *others),
        "torch": torch.get_rng_state(),
    }
    if backend(device).is_host:  # whose generator is torch's own
        return states
    module = torch.get_device_module(device)
    states[device.type] = module.get_rng_state(*_index(device))
    return states


def restore_random_states(states: dict, device: torch.device | str = "cpu") -> None:
    """Put back what `random_states` returned; a device that was not in use then is left alone."""
    device = torch.device(device)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type in states:
        module = torch.get_device_module(device)
        module.set_rng_state(states[device.type], *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """The argument that says which of several devices, for those that take one."""
    if not backend(device).rng_takes_index:
        return ()
    return (device,)
