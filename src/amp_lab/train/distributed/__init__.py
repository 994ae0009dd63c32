"""Several processes: the process group, and the communication between ranks."""

from amp_lab.parallel.collectives import count_communication

__all__ = ["count_communication"]
