"""The memory that copies are made in: one buffer, which is kept from save to save.

Its pages are there before the first save, where that leaves the time for it: fresh pages cost more than twice the copy, and far
more in a virtual machine whose host has yet to find the memory (for 401 MB 1.3 s were seen, and 0.06 s when it had).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from typing import Final

import torch

_AT_ONCE: Final = 2 << 20
"""Bytes, a large page: who takes the buffer meanwhile waits for the pages of so many."""


class Room:
    """``pinned``: for copies from a CUDA device. One save at a time has the buffer; any thread may make room for the first."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._touched = 0  # bytes from its begin whose pages are there
        self._taken = False  # by a save: what lies there is not to be touched any more
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """Have ``nbytes`` for the first save, and their pages, as many as the system finds until it takes the buffer: its copies
        find the rest. Without effect from then on. Raises ``MemoryError``."""
        with self._lock:
            if not self._taken:
                self._have(nbytes)
        while self._touch():
            pass

    def take(self, nbytes: int) -> torch.Tensor:
        """At least ``nbytes``, for copies. Raises ``MemoryError``."""
        self._taken = True  # before the lock, so that who touches the buffer does so no longer
        with self._lock:
            self._have(nbytes)
            return self._buffer

    def _have(self, nbytes: int) -> None:
        if self._buffer.numel() >= nbytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        try:
            self._buffer = _pinned_pages(nbytes) if self._pinned else _pages(nbytes)
        except (RuntimeError, OSError) as error:  # as torch and the system say it
            raise MemoryError(f"no memory for a copy of {nbytes} bytes: {error}") from error
        self._touched = nbytes if self._pinned else 0

    def _touch(self) -> bool:
        """The next pages. Is there more to be touched?"""
        with self._lock:
            part = self._buffer[self._touched : self._touched + _AT_ONCE]
            if self._taken or not part.numel():
                return False
            ctypes.memset(part.data_ptr(), 0, part.numel())  # without the GIL, and in this thread alone
            self._touched += part.numel()
            return True


def _pinned_pages(nbytes: int) -> torch.Tensor:
    """Pages that stay where they are, as the device needs them; they are there at once."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _pages(nbytes: int) -> torch.Tensor:
    """Whole pages, large ones where the system has them: a disk takes them in fewer pieces, and a copy misses fewer addresses.
    Processes that this one forks (workers that load data) have none of it: what they share would be copied, page by page, as soon
    as the next save is copied to it."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(AttributeError, OSError):  # a system without
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)
