"""CPU settings of a rank: glibc's allocator, the garbage collector, the number of cores.

Allocator: glibc must keep the memory that a step on the CPU frees, since the next step needs as much again. A step frees all
gradients and activations. By default glibc returns the top of the heap to the system when more than a threshold is free there (at
first 128 KiB, at most 64 MiB), and large blocks likewise; every page is then faulted in again, which takes up to a third of the
CPU time of a step of a small model. Results do not depend on this setting. Processes that a rank forks, such as DataLoader
workers, inherit it.

Garbage collector: it is off while a rank or the fork server imports torch, and during the work of a save that training waits for.
"""

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
    """Make the allocator of this process keep freed memory, and return True. Blocks above 32 MiB (mallopt(3)), and what is
    free at the heap's top beyond 1 GiB, are still returned to the system. Return False, without effect, if the environment has
    the user's own settings of these thresholds, or any ``glibc.malloc`` tunable, or if the process does not use glibc. Also
    return False if glibc refuses a setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    own = any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is None or own:
        return False
    return all((mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP), mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)))


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Run the block without garbage collection, then enable it again if it was enabled. Objects created by an import, for
    example, stay alive, and scanning them repeatedly takes a quarter of the time of importing torch."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


_MAX_CORES: Final = 4  # more threads do not increase disk or memory throughput


def rank_cores() -> int:
    """Return the number of cores that this rank's own threads (for disk and memory work) may use: its share of the cores that it
    may run on, from 1 to 4. Outside a rank it is 1, since an export runs next to other jobs."""
    ranks = os.environ.get(env_vars.LOCAL_WORLD_SIZE)
    if ranks is None:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)) // int(ranks), _MAX_CORES))
