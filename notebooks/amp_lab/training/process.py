"""What a run asks of its process: the signals to stop, and the memory that it took."""

import signal
import sys
import threading
import time
import types

import torch

from amp_lab.backends import backend


class StopSignals:
    """Notes the first SIGINT or SIGTERM within the block; the next ends the program as ever.

    One that comes within a second is the same: a batch system sends it to torchrun and to all
    processes, and torchrun passes it on.
    """

    def __init__(self):
        self.signal = 0  # the number of the one that came
        self._noted_s = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # others cannot be asked to
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if not self.signal:
            self.signal, self._noted_s = number, time.monotonic()
        elif time.monotonic() - self._noted_s > 1:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on an accelerator that keeps count, else of this process."""
    if backend(device).keeps_peak:
        return torch.accelerator.max_memory_allocated(device)
    import resource  # which Windows has not

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
