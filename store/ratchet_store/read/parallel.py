"""Several threads for one call: for work that waits for the system or computes without holding the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[T], R]
IsCancelled = Callable[[], bool]
"""True if the caller has been interrupted. Long work polls it, and may then end with any result."""


def parallel_map(items: Sequence[T], make_worker: Callable[[IsCancelled], Work[T, R]], threads: int) -> list[R]:
    """Return the results of all items, in their order. Up to ``threads`` threads, the caller's included, each process items by a
    function from ``make_worker``. Raises the error of the first item that has one; blocks until no thread is at work."""
    numbers = iter(range(len(items)))  # the GIL makes ``next`` atomic: no two threads get the same number
    results = dict[int, R]()
    # by item; items are begun in order, so the lowest one's is the error that a single thread would have raised
    errors = dict[int, BaseException]()
    begun, cancelled = threading.Event(), False

    def run(caught: type[BaseException]) -> None:
        work: Work[T, R] | None = None
        begun.wait()
        while not cancelled and not errors and (number := next(numbers, None)) is not None:
            try:
                work = work or make_worker(lambda: cancelled)
                results[number] = work(items[number])
            except caught as error:
                errors[number] = error

    count = min(threads, len(items)) - 1
    pool, helpers = ThreadPoolExecutor(max(count, 1), threading.current_thread().name), list[Future[None]]()
    try:
        with suppress(RuntimeError):  # a limit on processes
            for _ in range(count):
                helpers.append(pool.submit(run, BaseException))
        # not before: an interrupted ``submit`` may have started a thread that is not among the helpers
        begun.set()
        run(Exception)
    except BaseException:
        cancelled = True
        raise
    finally:
        interrupt: BaseException | None = None
        while True:  # even if the caller is interrupted, also on entering the call: helpers write into its memory
            try:
                begun.set()
                while wait(helpers, 0.1).not_done:  # a signal that comes just before a thread waits does not wake it
                    pass
                break
            except BaseException as error:  # raised by a signal handler
                cancelled, interrupt = True, error
        cancelled = True  # if a thread did not start, another one runs its ``run``
        pool.shutdown()
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt  # it holds this frame
    if not errors:
        return [results[number] for number in range(len(items))]
    first = errors[min(errors)]
    errors.clear()
    try:
        raise first
    finally:
        del first  # it holds this frame: its thread's objects would stay until a garbage collection
