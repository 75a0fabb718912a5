"""CPU settings of a rank: glibc's allocator, the garbage collector, the number of cores."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ratchet_contract import env_vars

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_TRIM_THRESHOLD_BYTES: Final = (
    1 << 30
)  # bytes; free memory beyond this at the top of the heap is returned to the system
_LARGEST_IN_HEAP: Final = 32 << 20  # bytes; glibc's own maximum, which its dynamic threshold approaches
_VARIABLES: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> bool:
    """Make this process's allocator keep more of the freed memory. Returns False if that is impossible or the user has own
    settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    own = any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is None or own:
        return False
    # The next step needs the memory that a step frees. By default glibc returns most of it to the system, and faulting its pages
    # in again takes up to a third of the CPU time of a small model's step.
    return all((mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP), mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)))


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Context manager: run the block without automatic garbage collection, then enable it again if it was enabled."""
    was = gc.isenabled()
    # An import creates objects that stay alive; scanning them repeatedly takes a quarter of the time of importing torch.
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


_MAX_CORES: Final = 4  # more threads do not increase disk or memory throughput


def rank_cores() -> int:
    """Return how many cores this rank's own threads for disk and memory work may use, from 1 to 4."""
    ranks = os.environ.get(env_vars.LOCAL_WORLD_SIZE)
    if ranks is None:
        # An export runs next to other jobs.
        return 1
    return max(1, min(len(os.sched_getaffinity(0)) // int(ranks), _MAX_CORES))
