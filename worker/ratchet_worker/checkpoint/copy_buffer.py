"""The buffer that copies are made in, kept from save to save. Allocating its pages can take longer than the copy."""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress
from typing import Final

import torch

from ratchet_worker.ipc.memory_copies import Region

_CHUNK_BYTES: Final = 2 << 20
"""Bytes (a large page) touched at a time: a save that takes the buffer meanwhile waits for the pages of these only."""


class StagingBuffer:
    """The memory that copies are made in. ``pinned``: page-locked, for copies from a CUDA device. ``region``: the part of a file
    in memory that it is, not page-locked; None: memory of this process. One save at a time uses it."""

    def __init__(self, *, pinned: bool, region: Region | None = None) -> None:
        self._pinned, self._region = pinned, region
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._touched = 0  # bytes from its start whose pages are allocated
        self._acquired = False  # by a save: its contents must not be touched any more
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """Allocate ``nbytes`` for the first save, and touch their pages until a save takes the buffer. Does nothing if a save
        has taken the buffer before. Raises ``MemoryError``."""
        with self._lock:
            if not self._acquired:
                self._ensure_size(nbytes)
        while self._touch_next_pages():
            pass

    def acquire(self, nbytes: int) -> torch.Tensor:
        """Return the buffer, with at least ``nbytes`` bytes, for a save. Its earlier contents may be lost. Raises
        ``MemoryError``."""
        self._acquired = True  # before the lock, so that ``reserve`` stops touching the buffer
        with self._lock:
            self._ensure_size(nbytes)
            return self._buffer

    def _ensure_size(self, nbytes: int) -> None:
        """Replace the buffer by one of ``nbytes`` if it is smaller. Raises ``MemoryError``; the buffer is then empty."""
        if self._buffer.numel() >= nbytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old one first
        try:
            if self._region is not None:
                self._buffer = _pages_of(self._region, nbytes)
            else:
                self._buffer = _pinned_pages(nbytes) if self._pinned else _pages(nbytes)
        except (RuntimeError, OSError) as error:  # from torch and from the system
            raise MemoryError(f"no memory for a copy of {nbytes} bytes: {error}") from error
        self._touched = 0 if self._region is None and not self._pinned else nbytes

    def _touch_next_pages(self) -> bool:
        """Allocate the next pages. False if all are allocated or a save has taken the buffer."""
        with self._lock:
            part = self._buffer[self._touched : self._touched + _CHUNK_BYTES]
            if self._acquired or not part.numel():
                return False
            _allocate_pages(part)
            self._touched += part.numel()
            return True


def _allocate_pages(part: torch.Tensor) -> None:
    """Write to all pages of ``part``, so that the system allocates them."""
    part.numpy().fill(0)  # without the GIL; torch's ``fill_`` would use several threads


def _pinned_pages(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of page-locked memory, which copies from the device need. Its pages are allocated at once. Raises
    ``RuntimeError``."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _pages(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of memory in whole pages, large ones if the system has them. Raises ``OSError``."""
    return _as_tensor(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _pages_of(region: Region, nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of the file from the region's offset on, allocated at once. Raises ``OSError``."""
    os.posix_fallocate(
        region.fd, region.offset, nbytes
    )  # else a lack of memory would be a SIGBUS in the middle of a copy
    return _as_tensor(mmap.mmap(region.fd, nbytes, mmap.MAP_SHARED, offset=region.offset))


def _as_tensor(memory: mmap.mmap) -> torch.Tensor:
    """Return the mapped memory as a tensor of bytes."""
    # Large pages: a disk writes them in fewer pieces, and a copy has fewer TLB misses. Not inherited by forked processes: shared
    # pages would be copied, one by one, at the next save.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(AttributeError, OSError):  # a system that lacks it
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)
