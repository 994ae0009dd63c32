"""The signal that asks a run to stop, noted until the run comes to it."""

import signal
import threading
import time
from typing import Any

_SAME_SIGNAL_S = 1
"""A batch system sends a signal to torchrun and to all processes, and torchrun passes it on."""


class StopSignals:
    """Notes the first SIGINT or SIGTERM within the block; the next ends the program as ever."""

    def __init__(self):
        self.signal = 0  # the number of the one that came
        self._noted_s = 0.0
        self._handlers_before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # others cannot be asked to
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers_before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        now_s = time.monotonic()
        if not self.signal:
            self.signal = number
            self._noted_s = now_s
        elif now_s - self._noted_s > _SAME_SIGNAL_S:
            signal.signal(number, self._handlers_before[number])
            signal.raise_signal(number)
