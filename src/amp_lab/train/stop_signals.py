"""Record SIGINT and SIGTERM, so that a run can stop after the current step."""

import signal
import threading
import time
from typing import Any

# A second signal within this time is the same request: a batch system sends one to torchrun and to
# all processes, and torchrun sends it on to them.
_SAME_REQUEST_S = 1


class StopSignals:
    """The block in which the first SIGINT or SIGTERM only sets the attribute `signal`.

    A signal more than a second after the first has its usual effect, and ends the program. Outside
    the main thread, all signals have their usual effect.
    """

    def __init__(self):
        self.signal = 0  # number of the first signal; 0 until it comes
        self._first_signal_s = 0.0  # its time, by `time.monotonic`
        self._handlers_before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        # Python lets only the main thread set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers_before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        """Record the first signal, and ignore others within a second after it.

        For a later one, restore the handler from before the block, and send the signal again.
        """
        now_s = time.monotonic()
        if not self.signal:
            self.signal = number
            self._first_signal_s = now_s
        elif now_s - self._first_signal_s > _SAME_REQUEST_S:
            signal.signal(number, self._handlers_before[number])
            signal.raise_signal(number)
