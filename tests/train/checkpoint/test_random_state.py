"""The random states: what goes on draws what it would have drawn."""

import random

import numpy as np
import torch

from amp_lab import load_checkpoint, save_checkpoint
from amp_lab.train.checkpoint import random_states, restore_random_states


def draws() -> list:
    return [random.random(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()]


def test_random_states_come_back(tmp_path):
    path = tmp_path / "checkpoint.pt"
    np.random.randn()  # leaves half of a pair of normal numbers in the state
    save_checkpoint(path, random=random_states())
    expected = draws()
    assert draws() != expected
    restore_random_states(load_checkpoint(path)["random"])
    assert draws() == expected
