"""Several threads for one call: for work that waits for the system or computes without holding the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[T], R]
IsCancelled = Callable[[], bool]
"""True if the caller has been interrupted. Long work polls it, and may then end with any result."""


def parallel_map(items: Sequence[T], make_worker: Callable[[IsCancelled], Work[T, R]], threads: int) -> list[R]:
    """Return the results of all items, in their order. Up to ``threads`` threads, the caller's included, each process items by a
    function from ``make_worker``. Raises the error of the first item that has one; blocks until no thread is at work."""
    count = min(threads, len(items))
    if count <= 1:
        work = make_worker(lambda: False)
        return [work(item) for item in items]
    shared = _Shared(items, make_worker)
    helpers: list[threading.Thread] = []
    try:
        for number in range(1, count):
            helper = threading.Thread(
                target=shared.help, name=f"{threading.current_thread().name}/{number}", daemon=True
            )
            try:
                helper.start()
            except RuntimeError:  # a limit on processes
                break
            helpers.append(helper)
        shared.run(Exception)
    except BaseException:
        shared.cancelled = True
        raise
    finally:
        interrupt: BaseException | None = None
        while True:  # even if the caller is interrupted, also on entering the call: helpers write into its memory
            try:
                shared.close()
                break
            except BaseException as error:  # raised by a signal handler
                shared.cancelled, interrupt = True, error
        for helper in helpers:
            helper.join()  # it has finished all its work
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt  # it holds this frame
    return shared.outcome()


class _Shared(Generic[T, R]):
    """The items and their results, shared by the threads of one ``parallel_map``."""

    def __init__(self, items: Sequence[T], make_worker: Callable[[IsCancelled], Work[T, R]]) -> None:
        self._items, self._make_worker = items, make_worker
        self._changed = threading.Condition()
        self._next = self._active_helpers = 0
        self._closed = False
        self._results: dict[int, R] = {}
        # by item; items are begun in order, so the lowest one's is the error that a single thread would have raised
        self._errors: dict[int, BaseException] = {}
        self.cancelled = False

    def help(self) -> None:
        """Process items in a helper thread. Does nothing if ``close`` was called before."""
        with self._changed:
            if self._closed:
                return
            self._active_helpers += 1
        try:
            self.run(BaseException)
        finally:
            with self._changed:
                self._active_helpers -= 1
                self._changed.notify()

    def run(self, caught: type[BaseException]) -> None:
        """Process items until no further one is to be begun. ``caught``: exceptions that are recorded as an item's error; others
        are raised."""
        work: Work[T, R] | None = None
        while (number := self._take()) is not None:
            try:
                work = work or self._make_worker(lambda: self.cancelled)
                self._results[number] = work(self._items[number])
            except caught as error:
                self._errors[number] = error

    def _take(self) -> int | None:
        """Return the number of the next item, None if no further item is to be begun."""
        with self._changed:
            if self.cancelled or self._errors or self._next == len(self._items):
                return None
            self._next += 1
            return self._next - 1

    def close(self) -> None:
        """Make helpers that start from now on do nothing, and block until no helper is at work any more."""
        with self._changed:
            self._closed = True
            while (
                self._active_helpers
            ):  # not join: when interrupted, it may take a running thread for ended (bpo-46726)
                self._changed.wait(0.1)  # a signal that comes just before a thread waits does not wake it

    def outcome(self) -> list[R]:
        """Return all results in the items' order, or raise the error of the first item that has one."""
        if not self._errors:
            return [self._results[number] for number in range(len(self._items))]
        error = self._errors[min(self._errors)]
        self._errors.clear()
        try:
            raise error
        finally:
            del error  # it holds this frame: its thread's objects would stay until a garbage collection
