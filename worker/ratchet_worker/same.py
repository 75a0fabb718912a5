"""Are these the very same objects as before?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final

CONSTANTS: Final = (int, float, bool, str, type(None))
"""Held as they are: small, and never changed."""


class Same:
    """Told by the objects' numbers. Others than ``CONSTANTS`` are held weakly: what nobody else needs any more goes, and once one
    is gone its number says nothing."""

    def __init__(self, objects: Iterable[Any]) -> None:
        listed = [*objects]
        self._ids = [*map(id, listed)]
        self._constants = [one for one in listed if isinstance(one, CONSTANTS)]
        self._gone: list[object] = []
        self._others = [weakref.ref(one, self._gone.append) for one in listed if not isinstance(one, CONSTANTS)]

    def holds(self, objects: Iterable[Any]) -> bool:
        """The same ones in the same order, as many as before."""
        return not self._gone and [*map(id, objects)] == self._ids
