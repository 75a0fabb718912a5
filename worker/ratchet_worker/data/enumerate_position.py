"""Finds an ``enumerate`` around an iterator that resumes in the middle, and makes it continue with the right number."""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Iterator
from itertools import repeat
from types import FrameType, GeneratorType
from typing import Any, Final

from ratchet_worker.state import loop_variables

RESTARTED: Final = (
    "the loop numbers a progress bar, or another generator or map over the loader, with enumerate: after a resume within an "
    "epoch it counts from 0. Write session.enumerate(...) in place of enumerate(...)"
)
"""The problem where a number cannot be set."""

BY_NEXT: Final = (
    "the loop takes batches with next(): after a resume within an epoch the loader keeps its position, but code that counts or "
    "keeps batches around it (`for n in range(N)`, a prefetcher) starts over. Write `for batch in loader`, and `if n == N: "
    "break` in place of range(N)"
)
"""The problem where the loop is not over the loader."""

THROUGH: Final = (
    "the loop reads the loader through {name}: after a resume within an epoch the loader continues at its position, and {name} "
    "starts over, with its count and its other inputs. Write `if n == N: break` in place of islice; put the other inputs "
    "of zip into the loader's data set (torch.utils.data.StackDataset)"
)
"""The problem where the loader is read by something that keeps a count, an item or another iterator."""

_PASSING: Final = (map, filter, itertools.chain, itertools.starmap, itertools.takewhile, itertools.filterfalse)
_KEEPING: Final = (zip, *(one for one in vars(itertools).values() if hasattr(one, "__next__") and one not in _PASSING))


def enumerate_readers(iterator: Iterator[Any]) -> list[enumerate[Any]]:
    """Return the existing ``enumerate`` objects that read ``iterator`` directly; ``iterator`` is compared by identity."""
    return [one for one in gc.get_referrers(iterator) if isinstance(one, enumerate)]


def find_restarted(iterator: Iterator[Any], frame: FrameType | None) -> str | None:
    """Return a sentence about code around ``iterator`` that starts over after a resume, such as an outer ``enumerate``; None if
    none is found. ``frame``: the frame of the loop that reads ``iterator``, if known."""
    if loop_variables.calls_next(frame):
        return BY_NEXT
    waiting = _running_generators(frame)
    for one in _iterators_reading(iterator):
        # An enumerate directly around the iterator: ``advance`` makes it continue.
        waiting += _iterators_reading(one) if type(one) is enumerate else [one]
    while waiting:
        one = waiting.pop()
        if type(one) is enumerate:
            # It cannot be advanced: a generator is running already, and map would call its function.
            return RESTARTED
        reads_others = type(one) is map and len(one.__reduce__()[1]) > 2  # the function, and more than one iterator
        if type(one) in _KEEPING or reads_others:
            return THROUGH.format(name=type(one).__name__)
        waiting += _iterators_reading(one)
    return None


def _iterators_reading(iterator: Any) -> list[Any]:
    """Return Python's built-in iterators that read ``iterator`` directly."""
    kinds = (enumerate, *_PASSING, *_KEEPING)
    found = gc.get_referrers(iterator)
    # zip and map hold the iterators that they read in a tuple.
    tuples = [one for one in found if type(one) is tuple]
    return [one for one in (*found, *(gc.get_referrers(*tuples) if tuples else ())) if type(one) in kinds]


def _running_generators(frame: FrameType | None) -> list[Any]:
    """Return the generators that run in ``frame`` and, as long as these are generators, in its callers."""
    running: list[FrameType] = []
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        running.append(frame)
        frame = frame.f_back
    if not running:
        return []
    return [one for one in gc.get_objects() if type(one) is GeneratorType and one.gi_frame in running]


def advance(reader: enumerate[Any], count: int) -> None:
    """Take ``count`` items from ``reader``, so that its number increases. During this call, the iterator inside ``reader`` must
    return placeholders, without delay."""
    # enumerate requests an item before it reads its counter: an iterator asked for its first item can still advance it.
    for _ in repeat(None, count):
        next(reader)
