"""``enumerate`` around an iterator that begins in the middle: found, and made to go on with its number.

``enumerate`` asks for an item before it looks at its own number. So an iterator that is asked for its first item may ask the
``enumerate`` that reads it for as many as were used before, give it nothing but placeholders, and then give the item.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from itertools import repeat
from types import FrameType, GeneratorType
from typing import Any, Final

ANEW: Final = (
    "the loop numbers a progress bar, or another generator over the loader, with enumerate: behind a resume within an epoch from "
    "0 on. Write session.enumerate(...) in place of enumerate(...)"
)
"""What is wrong where a number cannot be set."""


def readers(iterator: Iterator[Any]) -> list[enumerate[Any]]:
    """Those that read ``iterator`` themselves."""
    return [one for one in gc.get_referrers(iterator) if isinstance(one, enumerate)]


def behind_generators(frame: FrameType | None) -> bool:
    """Does one read a generator, a progress bar's say, that runs in ``frame`` and reads the iterator? Its number cannot be set:
    it would ask a generator that is at work."""
    running: list[FrameType] = []
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        running.append(frame)
        frame = frame.f_back
    if not running:
        return False
    generators = [one for one in gc.get_objects() if type(one) is GeneratorType and one.gi_frame in running]
    return any(readers(generator) for generator in generators)


def advance(reader: enumerate[Any], count: int) -> None:
    """``count`` items that the iterator gives at once, so that the next number is that of the item behind them."""
    for _ in repeat(None, count):
        next(reader)
