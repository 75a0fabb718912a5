"""Work that does not stop for the garbage collector: imports, and what training waits for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection. What importing makes stays, for one, and looking through it again and again takes a quarter of
    the time that importing torch takes."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
