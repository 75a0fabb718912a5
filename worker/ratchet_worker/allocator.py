"""glibc's allocator keeps what a step frees: on the CPU the next one needs as much again.

A step frees all gradients and activations. glibc gives the top of the heap back to the system when more than a threshold is free
there, at most 64 MiB and at first 128 KiB, and blocks of the larger sizes likewise; every page of it is then faulted in again, up
to a third of the processor time of a step of a small model. Nothing that is computed depends on it. Processes that a rank forks,
such as DataLoader workers, inherit it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT: Final = 1 << 30  # bytes: what is free beyond that at the top of the heap goes back
_LARGEST_IN_HEAP: Final = 32 << 20  # bytes: glibc's own upper limit, to which it moves by itself as blocks are freed
_VARIABLES: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed() -> bool:
    """For this process, from now on; blocks of more than 32 MiB still come from the system and go back to it (mallopt(3)).

    Without effect (False) where a user's own setting of the allocator stands in the environment, and where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    own = any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is None or own:
        return False
    return all((mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP), mallopt(_M_TRIM_THRESHOLD, _KEPT)))
