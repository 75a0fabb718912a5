"""Several threads of one call: for work that waits for the system or computes, outside Python's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[T], R]
GivenUp = Callable[[], bool]
"""Has the caller been interrupted? Work that takes long asks, and may then end with any result."""


def abreast(items: Sequence[T], begin: Callable[[GivenUp], Work[T, R]], threads: int) -> list[R]:
    """The results of all items, in their order. Up to ``threads`` threads, the caller among them, take the items in their order;
    each calls ``begin`` once for what it does with its own. Where the system gives fewer threads, those there are do it all.

    It ends as with one thread: what is raised is the error of the first item that has one; all before it are done, behind it no
    more are begun. When it returns or raises, an interrupt included, none of its threads is at work any more.
    """
    count = min(threads, len(items))
    if count <= 1:
        work = begin(lambda: False)
        return [work(item) for item in items]
    shared = _Shared(items, begin)
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
        shared.given_up = True
        raise
    finally:
        interrupt: BaseException | None = None
        while True:  # be the caller interrupted or not, also as it enters the call: helpers write into its memory
            try:
                shared.close()
                break
            except BaseException as error:  # of a signal's handler
                shared.given_up, interrupt = True, error
        for helper in helpers:
            helper.join()  # it is behind all its work
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt  # it holds this frame
    return shared.outcome()


class _Shared(Generic[T, R]):
    """The items, and what became of them. ``_errors`` by the item's number: since items are begun in order, the least is the
    one that a single thread had met once nobody is at work."""

    def __init__(self, items: Sequence[T], begin: Callable[[GivenUp], Work[T, R]]) -> None:
        self._items, self._begin = items, begin
        self._changed = threading.Condition()
        self._next = self._helping = 0
        self._closed = False
        self._results: dict[int, R] = {}
        self._errors: dict[int, BaseException] = {}
        self.given_up = False

    def help(self) -> None:
        """What a helper does: nothing if it comes too late."""
        with self._changed:
            if self._closed:
                return
            self._helping += 1
        try:
            self.run(BaseException)
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify()

    def run(self, kept: type[BaseException]) -> None:
        """Take items until there are no more. ``kept``: what is an item's error; an interrupt of the caller is none."""
        work: Work[T, R] | None = None
        while (number := self._take()) is not None:
            try:
                work = work or self._begin(lambda: self.given_up)
                self._results[number] = work(self._items[number])
            except kept as error:
                self._errors[number] = error

    def _take(self) -> int | None:
        with self._changed:
            if self.given_up or self._errors or self._next == len(self._items):
                return None
            self._next += 1
            return self._next - 1

    def close(self) -> None:
        """Wait until nobody helps any more."""
        with self._changed:
            self._closed = True
            while self._helping:  # not join: interrupted, it may take a thread that runs for ended (bpo-46726)
                self._changed.wait(0.1)  # a signal that comes just before a thread waits does not wake it

    def outcome(self) -> list[R]:
        """Raises the first error."""
        if not self._errors:
            return [self._results[number] for number in range(len(self._items))]
        error = self._errors[min(self._errors)]
        self._errors.clear()
        try:
            raise error
        finally:
            del error  # it holds this frame: what its thread had would stay until a collection
