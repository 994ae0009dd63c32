"""Several processes: which rank this is, how they agree, and what they send each other."""

from amp_lab.parallel.collectives import count_communication

__all__ = ["count_communication"]
