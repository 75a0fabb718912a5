"""Calls that a thread makes beside the one that wants their results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from ratchet_worker.turns import give_way, take_turns_late

T = TypeVar("T")


class Aside:
    """One thread, for one call after the other. It is there from the beginning, so that no call fails for want of a thread, and
    nobody waits for it where the process ends. Whoever awakes has the processor before it; ``quiet``: and most of it where both
    want it for long."""

    def __init__(self, name: str, *, quiet: bool = False) -> None:
        self._calls: SimpleQueue[Call[Any]] = SimpleQueue()
        threading.Thread(target=self._run, args=(quiet,), name=name, daemon=True).start()

    def begin(self, work: Callable[[], T]) -> Call[T]:
        call = Call(work)
        self._calls.put(call)
        return call

    def _run(self, quiet: bool) -> None:
        take_turns_late()
        if quiet:
            give_way()
        while True:
            call = self._calls.get()
            call.make()
            del call  # and with it what it holds, which is not to lie here until the next


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
