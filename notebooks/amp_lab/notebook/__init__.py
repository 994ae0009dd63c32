"""For the notebooks alone: their set-up cell, and their functions in other processes."""

from amp_lab.notebook.keras_demo import run_on_backends
from amp_lab.notebook.setup import Scale, pick_scale, start
from amp_lab.notebook.workers import run_workers

__all__ = ["Scale", "pick_scale", "run_on_backends", "run_workers", "start"]
