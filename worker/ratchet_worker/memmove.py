"""Bytes from one place in memory to another, without Python's lock.

Of a large copy that nobody looks at soon the processor need not keep anything in its caches, nor read what it is going to
overwrite: past the caches it takes about 0.6 of the time, and what a training has there stays. The C library does so only above
a size that it derives from the caches that it sees, in a virtual machine maybe those of the whole host: few tensors are as
large. StringZilla's ``sz_copy`` does so from 1 MiB on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import stringzilla

_LARGE: Final = 1 << 20  # bytes from which on ``sz_copy`` goes past the caches
_STREAMING: Final = frozenset({"haswell", "skylake"})
"""Kinds of processors, as StringZilla names them, on which it does so. On others it may be slower than the C library."""
_Move = Callable[[int, int, int], object]


def _for_large() -> _Move:
    """The C library's, where StringZilla has nothing better for this processor, or keeps its function to itself."""
    if _STREAMING.isdisjoint(stringzilla.__capabilities__):
        return ctypes.memmove
    try:
        found = ctypes.CDLL(stringzilla.__file__).sz_copy
    except (OSError, AttributeError):
        return ctypes.memmove
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    copy: _Move = found
    return copy


_small: Final[_Move] = ctypes.memmove
_large: Final[_Move] = _for_large()


def memmove(target: int, origin: int, nbytes: int) -> None:
    """Copy ``nbytes`` bytes between addresses; the two places do not overlap. What another thread reads of it, once it knows that
    this has returned, is the copy."""
    (_large if nbytes >= _LARGE else _small)(target, origin, nbytes)
