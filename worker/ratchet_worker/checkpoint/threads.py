"""Helpers for the threads of a save: calls in a background thread, scheduling, and waiting for each other."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

_NICE: Final = 5
"""Added to the nice value. Where a training thread and this one want the same processor, this one gets a quarter of it. Not
less: it sometimes holds the GIL, and training threads wait for that. With two other busy processes on two cores, a loop of small
steps did 84 steps in four seconds with a saving thread of nice 0, 132 with 5 (130 without such a thread), 93 with 10, 47 with
19."""


def raise_nice_value() -> None:
    """On Linux, raise the calling thread's nice value permanently, so that other busy threads get most of the processor."""
    if sys.platform == "linux":
        with suppress(OSError):
            thread = threading.get_native_id()
            # Linux's setpriority(2) affects one thread, POSIX's a process.
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + _NICE, 19))


_POLL_SECONDS: Final = 0.5
"""Seconds between two checks by a waiting thread, in case the thread that was to wake it was interrupted."""


class Signal:
    """Threads wait here for a condition on data that other threads change. Not a ``threading.Condition``: a thread that a signal
    handler interrupts in that class may hold its lock for ever. Here it holds none."""

    def __init__(self) -> None:
        self._waiters: list[SimpleQueue[None]] = []

    def notify(self) -> None:
        """Have all waiting threads check their conditions. Call it after each change of the data."""
        for waiter in [*self._waiters]:
            waiter.put(None)

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``condition()`` is true, for at most ``timeout`` seconds. Return the last value of ``condition()``."""
        end = None if timeout is None else time.monotonic() + timeout
        waiter = SimpleQueue[None]()
        self._waiters.append(waiter)
        try:
            while not (fulfilled := condition()):
                left = _POLL_SECONDS if end is None else min(end - time.monotonic(), _POLL_SECONDS)
                if left <= 0:
                    break
                with suppress(Empty):
                    waiter.get(timeout=left)
        finally:
            self._waiters.remove(waiter)
        return fulfilled


T = TypeVar("T")


class BackgroundThread:
    """A daemon thread that makes submitted calls one after the other. ``quiet``: the thread calls ``raise_nice_value``."""

    def __init__(self, name: str, *, quiet: bool = False) -> None:
        self._calls: SimpleQueue[Call[Any]] = SimpleQueue()
        # Started here, so that no later call fails because a thread cannot be started.
        threading.Thread(target=self._run, args=(quiet,), name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Call[T]:
        """Queue the call of ``work``, and return at once an object with which to wait for its result."""
        call = Call(work)
        self._calls.put(call)
        return call

    def _run(self, quiet: bool) -> None:
        """The thread's main loop: make the submitted calls in order."""
        if quiet:
            raise_nice_value()
        while True:
            call = self._calls.get()
            call.run()
            del call  # and what it holds, which must not stay in memory until the next call


class Call(Generic[T]):
    """A call that another thread makes. ``result`` may be called only once."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Make the call in the thread that calls ``run``, and keep its result or its error for ``result``."""
        work, self._work = self._work, None
        assert work is not None
        try:
            self._result.append(work())
        except BaseException as error:  # raised by ``result``
            self._error = error
        finally:
            self._done.set()

    def result(self) -> T:
        """Wait until the call has been made, and return its result. Raises what the call raised."""
        self._done.wait()
        # Not kept: its traceback holds all that was in progress.
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        return self._result.pop()
