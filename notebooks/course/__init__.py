"""Helpers for the notebooks alone: first cell, figures, exercises, functions in other processes."""

from course.start import Scale, emulates_bf16, pick_scale, start

__all__ = ["Scale", "emulates_bf16", "pick_scale", "start"]
