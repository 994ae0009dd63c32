"""Checkpoints: files that are never half written, shards, and the states of random generators."""

from amp_lab.train.checkpoint.file import is_checkpoint, load_checkpoint, save_checkpoint
from amp_lab.train.checkpoint.random_state import random_states, restore_random_states

__all__ = [
    "is_checkpoint",
    "load_checkpoint",
    "random_states",
    "restore_random_states",
    "save_checkpoint",
]
