"""Calls that a thread makes beside the one that wants their results."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_NICE: Final = 5
"""Where both want a processor, such a thread has a quarter of it. Not less: it holds Python's lock now and then, and who trains
waits for that. Beside two other busy processes on two cores a loop of small steps did 84 of them in four seconds with a saving
thread of nice 0, 132 with 5 (130 without any), 93 with 10 and 47 with 19."""


class Aside:
    """One thread, for one call after the other. It is there from the beginning, so that no call fails for want of a thread, and
    nobody waits for it where the process ends. ``quiet``: it leaves most of the processor to whoever else wants it."""

    def __init__(self, name: str, *, quiet: bool = False) -> None:
        self._calls: SimpleQueue[Call[Any]] = SimpleQueue()
        threading.Thread(target=self._run, args=(quiet,), name=name, daemon=True).start()

    def begin(self, work: Callable[[], T]) -> Call[T]:
        call = Call(work)
        self._calls.put(call)
        return call

    def _run(self, quiet: bool) -> None:
        if quiet:
            _give_way()
        while True:
            call = self._calls.get()
            call.make()
            del call  # and with it what it holds, which is not to lie here until the next


def _give_way() -> None:
    """Of this thread alone, and for good: only the privileged may take it back. Linux's setpriority(2) is about a thread (POSIX
    means a process); elsewhere nothing happens."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class Call(Generic[T]):
    """``result`` once: it keeps nothing of an error, whose traceback holds all that was under way."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

    def make(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            self._result.append(work())
        except BaseException as error:  # raised where the result is asked for
            self._error = error
        finally:
            self._done.set()

    def result(self) -> T:
        """Waits for it. Raises what the call raised."""
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        return self._result.pop()
