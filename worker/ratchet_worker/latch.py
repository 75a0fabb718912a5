"""What happens once, and who waits for it; between the loop's thread, which a signal's handler may interrupt at any moment by an
exception, and those of a save."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Final

_LOOK: Final = 0.5
"""Seconds between two looks of who waits, in case that an interrupted thread holds the lock for good."""


class Latch:
    """As ``threading.Event``, which stays set. That one has a condition, in Python: a thread that is interrupted there may keep
    the condition's lock for good, and whoever sets or waits for the event next is stuck. Here the flag alone counts; the lock
    only wakes."""

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """``timeout``: seconds. Is it set?"""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = _LOOK if end is None else min(end - time.monotonic(), _LOOK)
            if left <= 0:
                break
            if self._lock.acquire(timeout=left):
                self._wake()  # the next who waits
        return self._is_set

    def _wake(self) -> None:
        with suppress(RuntimeError):  # another has done so
            self._lock.release()
