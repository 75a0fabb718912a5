"""``enumerate`` around an iterator that begins in the middle: found, and made to go on with its number. ``zip``, ``islice`` and
others that would have to go on, too: found, and named.

``enumerate`` asks for an item before it looks at its own number. So an iterator that is asked for its first item may ask the
``enumerate`` that reads it for as many as were used before, give it nothing but placeholders, and then give the item.
"""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Iterator
from itertools import repeat
from types import FrameType, GeneratorType
from typing import Any, Final

from ratchet_worker import loop_variables

ANEW: Final = (
    "the loop numbers a progress bar, or another generator or map over the loader, with enumerate: after a resume within an "
    "epoch from 0 on. Write session.enumerate(...) in place of enumerate(...)"
)
"""What is wrong where a number cannot be set."""

BY_NEXT: Final = (
    "the loop takes batches with next(): after a resume within an epoch the loader goes on where it was, and what counts or "
    "keeps batches around it (`for n in range(N)`, a prefetcher) starts over. Write `for batch in loader`, and `if n == N: "
    "break` in place of range(N)"
)
"""What is wrong where the loop is not over the loader."""

THROUGH: Final = (
    "the loop reads the loader through {name}: after a resume within an epoch the loader goes on where it was, and {name} "
    "starts over, with its count and with what it reads beside the loader. Write `if n == N: break` in place of islice; put what "
    "zip reads beside the loader into its data set (torch.utils.data.StackDataset)"
)
"""What is wrong where something reads the loader that keeps a count, an item or another iterator."""

_PASSING: Final = (map, filter, itertools.chain, itertools.starmap, itertools.takewhile, itertools.filterfalse)
_KEEPING: Final = (zip, *(one for one in vars(itertools).values() if hasattr(one, "__next__") and one not in _PASSING))


def readers(iterator: Iterator[Any]) -> list[enumerate[Any]]:
    """Those that read ``iterator`` themselves."""
    return [one for one in gc.get_referrers(iterator) if isinstance(one, enumerate)]


def anew(iterator: Iterator[Any], frame: FrameType | None) -> str | None:
    """What of the loop that reads ``iterator``, in ``frame`` or through generators that run there, will not go on after a resume
    within an epoch; None where all does. An ``enumerate`` around a generator, a progress bar's say, would ask one that is at
    work; one around ``map`` would have it call its function."""
    if loop_variables.asks_by_next(frame):
        return BY_NEXT
    waiting = _running(frame)
    for one in _read_by(iterator):
        waiting += _read_by(one) if type(one) is enumerate else [one]
    while waiting:
        one = waiting.pop()
        if type(one) is enumerate:
            return ANEW
        reads_others = type(one) is map and len(one.__reduce__()[1]) > 2  # its function, and what it reads
        if type(one) in _KEEPING or reads_others:
            return THROUGH.format(name=type(one).__name__)
        waiting += _read_by(one)
    return None


def _read_by(iterator: Any) -> list[Any]:
    """Iterators of Python's own that read ``iterator``. ``zip`` and ``map`` hold theirs in a tuple."""
    kinds = (enumerate, *_PASSING, *_KEEPING)
    found = gc.get_referrers(iterator)
    tuples = [one for one in found if type(one) is tuple]
    return [one for one in (*found, *(gc.get_referrers(*tuples) if tuples else ())) if type(one) in kinds]


def _running(frame: FrameType | None) -> list[Any]:
    """Generators that run in ``frame``, from the inner to the outer."""
    running: list[FrameType] = []
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        running.append(frame)
        frame = frame.f_back
    if not running:
        return []
    return [one for one in gc.get_objects() if type(one) is GeneratorType and one.gi_frame in running]


def advance(reader: enumerate[Any], count: int) -> None:
    """``count`` items that the iterator gives at once, so that the next number is that of the item behind them."""
    for _ in repeat(None, count):
        next(reader)
