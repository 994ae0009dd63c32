"""Train a model in any precision: the loop, and runs that live in a folder."""

from amp_lab.training.loop import cross_entropy, evaluate, fit

__all__ = ["cross_entropy", "evaluate", "fit"]
