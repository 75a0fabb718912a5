"""Are these the very same objects as before?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final

from torch import nn

CONSTANTS: Final = (int, float, bool, str, type(None))
"""Small, and never changed."""
_HELD: Final = (*CONSTANTS, nn.Module, nn.Parameter)


class Same:
    """Told by the objects' numbers, and by that all of them are still there. Other tensors than parameters are held weakly: a
    training that replaces them in every step does not need the memory of two. (Parameters are held, since torch swaps none that
    has weak references, see ``torch.utils.swap_tensors``.)"""

    def __init__(self, objects: Iterable[Any]) -> None:
        listed = [*objects]
        self._ids = [*map(id, listed)]
        self._held = [one for one in listed if isinstance(one, _HELD)]
        self._gone: list[object] = []
        self._others = [weakref.ref(one, self._gone.append) for one in listed if not isinstance(one, _HELD)]

    def holds(self, objects: Iterable[Any]) -> bool:
        """The same ones in the same order, as many as before."""
        return not self._gone and [*map(id, objects)] == self._ids
