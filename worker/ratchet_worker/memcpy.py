"""Bytes from one place in memory to another, without Python's lock.

What a processor with AVX-512 copies past its caches (non-temporal stores) it need not read before it overwrites it, and keep
afterwards: 200 MB take about 0.6 of a plain copy's time (``benchmarks``, the store alone), and push less of what a training works
on out of the caches. The C library does so only above a size that it derives from the caches that it sees, in a virtual machine
maybe those of the whole host: few tensors are as large. StringZilla's ``sz_copy`` does so from 1 MiB on, and with a fence behind
it, so that whoever hears of the copy reads the copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import stringzilla

_LARGE: Final = 1 << 20  # bytes from which on ``sz_copy`` goes past the caches
_STREAMING: Final = "skylake"
"""StringZilla's name of the processors on which it does so. On others its copies are not much better than the C library's."""
_Copy = Callable[[int, int, int], object]


def _for_large() -> _Copy:
    """The C library's, where StringZilla has nothing better for this processor, or keeps its function to itself."""
    try:
        if _STREAMING not in stringzilla.__capabilities__:
            return ctypes.memmove
        found = ctypes.CDLL(stringzilla.__file__).sz_copy
    except (OSError, AttributeError):
        return ctypes.memmove
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    copy: _Copy = found
    return copy


_small: Final[_Copy] = ctypes.memmove
_large: Final[_Copy] = _for_large()


def memcpy(target: int, origin: int, nbytes: int) -> None:
    """Copy ``nbytes`` bytes between addresses; the two places do not overlap."""
    (_large if nbytes >= _LARGE else _small)(target, origin, nbytes)
