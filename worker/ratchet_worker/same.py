"""Are these the very same objects as before?"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from operator import call, is_
from typing import Any, Final

CONSTANTS: Final = (int, float, bool, str, type(None))
"""Held as they are: small, and never changed."""


class Same:
    """Others than ``CONSTANTS`` are held weakly: what nobody else needs any more goes, and by its number alone an object could be
    taken for one that came after it."""

    def __init__(self, objects: Iterable[Any]) -> None:
        listed = [*objects]
        self._kept = [_reference(one) for one in listed]
        self._nones = _nones(listed)

    def holds(self, objects: list[Any]) -> bool:
        """The same ones in the same order, as many as before."""
        # What has gone reads as None, too, and is no None that was there before.
        same = len(objects) == len(self._kept) and all(map(is_, objects, map(call, self._kept)))
        return same and _nones(objects) == self._nones


@dataclass(frozen=True)
class _Constant:
    value: Any

    def get(self) -> Any:
        return self.value


def _reference(item: Any) -> Callable[[], Any]:
    return _Constant(item).get if isinstance(item, CONSTANTS) else weakref.ref(item)


def _nones(objects: list[Any]) -> int:
    return sum(map(is_, objects, repeat(None)))
