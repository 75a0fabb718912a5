"""The memory for copies, which one thread makes ready while another may already want it."""

from __future__ import annotations

import resource
import threading

import pytest
import torch

from ratchet_worker.checkpoint import copy_buffer
from ratchet_worker.checkpoint.copy_buffer import StagingBuffer
from tests.support.server import wait_for

SIZE = 64 << 20


def joined(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def reserving(place: StagingBuffer) -> threading.Thread:
    thread = threading.Thread(target=place.reserve, args=(SIZE,), daemon=True)
    thread.start()
    return thread


class Held:
    """``copy_buffer._allocate_pages`` waits before its first call for ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go, real = threading.Event(), threading.Event(), copy_buffer._allocate_pages

        def allocate(part: torch.Tensor) -> None:
            self.begun.set()
            assert self.go.wait(20)
            real(part)

        monkeypatch.setattr(copy_buffer, "_allocate_pages", allocate)


class HeldLock:
    """Whoever is not the test waits before it has the lock for the third time (to have room, to touch, to touch again)."""

    def __init__(self) -> None:
        self.begun, self.go, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._mine, self._times = threading.get_ident(), 0

    def __enter__(self) -> None:
        if threading.get_ident() != self._mine:
            self._times += 1
            if self._times == 3:
                self.begun.set()
                assert self.go.wait(20)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_reserved_staging_buffer_has_pages_touched() -> None:
    place = StagingBuffer(pinned=False)
    place.reserve(SIZE)
    buffer = place.acquire(SIZE)
    before = faults()
    buffer.numpy().fill(7)
    assert faults() - before < 8, "32 are large pages, 16384 the others"


def test_staging_buffer_take_waits_only_for_pages_being_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, held, taken = StagingBuffer(pinned=False), Held(monkeypatch), list[torch.Tensor]()
    ready = reserving(place)
    assert held.begun.wait(20)
    takes = threading.Thread(target=lambda: taken.append(place.acquire(SIZE)), daemon=True)
    takes.start()
    wait_for(lambda: place._acquired, "it to be wanted")
    takes.join(0.2)
    assert takes.is_alive(), "what is being touched would be overwritten behind a copy"
    monkeypatch.undo()
    held.go.set()
    joined(takes, ready)
    assert place._touched <= 2 * copy_buffer._CHUNK_BYTES


def test_staging_buffer_is_not_touched_after_take(monkeypatch: pytest.MonkeyPatch) -> None:
    place, held = StagingBuffer(pinned=False), HeldLock()
    monkeypatch.setattr(place, "_lock", held)
    ready = reserving(place)
    assert held.begun.wait(20)
    copies = place.acquire(SIZE)
    copies.copy_(torch.full((SIZE,), 7, dtype=torch.uint8))
    held.go.set()
    joined(ready)
    assert copies.eq(7).all(), "a copy was overwritten"


def test_staging_buffer_reserve_after_take_allocates_nothing() -> None:
    """It would be a second buffer, beside the one whose copies are being written."""
    place = StagingBuffer(pinned=False)
    mine = place.acquire(1 << 20)
    place.reserve(SIZE)
    assert place.acquire(1 << 20).data_ptr() == mine.data_ptr()


def test_staging_buffer_take_grows_beyond_reserved_size() -> None:
    place = StagingBuffer(pinned=False)
    place.reserve(1 << 20)
    assert place.acquire(SIZE).numel() == SIZE and place.acquire(1 << 20).numel() == SIZE
