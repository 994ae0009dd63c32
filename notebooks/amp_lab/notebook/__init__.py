"""For the notebooks alone: their set-up cell, and their functions in other processes."""

from amp_lab.notebook.processes import run_on_backends, run_workers
from amp_lab.notebook.setup import Scale, emulates_bf16, pick_scale, start

__all__ = ["Scale", "emulates_bf16", "pick_scale", "run_on_backends", "run_workers", "start"]
