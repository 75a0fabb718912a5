"""The memory for copies, which one thread makes ready while another may already want it."""

from __future__ import annotations

import ctypes
import resource
import threading

import pytest
import torch

from ratchet_worker import room
from ratchet_worker.room import Room
from tests.support.server import wait_for

SIZE = 64 << 20


def joined(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def reserving(place: Room) -> threading.Thread:
    thread = threading.Thread(target=place.reserve, args=(SIZE,), daemon=True)
    thread.start()
    return thread


class Held:
    """``ctypes.memset`` waits before its first call for ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go, real = threading.Event(), threading.Event(), ctypes.memset

        def memset(*call: int) -> int:
            self.begun.set()
            assert self.go.wait(20)
            return real(*call)

        monkeypatch.setattr(ctypes, "memset", memset)


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


def test_the_first_save_finds_its_pages() -> None:
    place = Room(pinned=False)
    place.reserve(SIZE)
    buffer = place.take(SIZE)
    before = faults()
    ctypes.memset(buffer.data_ptr(), 7, SIZE)
    assert faults() - before < 8, "32 are large pages, 16384 the others"


def test_who_takes_it_waits_for_the_pages_that_are_being_touched_and_for_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, held, taken = Room(pinned=False), Held(monkeypatch), list[torch.Tensor]()
    ready = reserving(place)
    assert held.begun.wait(20)
    takes = threading.Thread(target=lambda: taken.append(place.take(SIZE)), daemon=True)
    takes.start()
    wait_for(lambda: place._taken, "it to be wanted")
    takes.join(0.2)
    assert takes.is_alive(), "what is being touched would be overwritten behind a copy"
    monkeypatch.undo()
    held.go.set()
    joined(takes, ready)
    assert place._touched <= 2 * room._AT_ONCE


def test_nothing_is_touched_any_more_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    place, held = Room(pinned=False), HeldLock()
    monkeypatch.setattr(place, "_lock", held)
    ready = reserving(place)
    assert held.begun.wait(20)
    copies = place.take(SIZE)
    copies.copy_(torch.full((SIZE,), 7, dtype=torch.uint8))
    held.go.set()
    joined(ready)
    assert copies.eq(7).all(), "a copy was overwritten"


def test_room_that_is_asked_for_when_a_save_has_its_own_is_not_made() -> None:
    """It would be a second buffer, beside the one whose copies are being written."""
    place = Room(pinned=False)
    mine = place.take(1 << 20)
    place.reserve(SIZE)
    assert place.take(1 << 20).data_ptr() == mine.data_ptr()


def test_a_save_that_needs_more_has_more() -> None:
    place = Room(pinned=False)
    place.reserve(1 << 20)
    assert place.take(SIZE).numel() == SIZE and place.take(1 << 20).numel() == SIZE
