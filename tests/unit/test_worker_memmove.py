"""Copies of a save are the bytes that were there, of whatever length, wherever they lie, whichever way they take."""

from __future__ import annotations

import ctypes
import random
import threading

import pytest
import stringzilla
import torch

from ratchet_worker import memmove as module
from ratchet_worker.memmove import memmove

_MIB = 1 << 20
_AROUND = 256  # bytes that are not to change


def _copied(start: int, to: int, nbytes: int) -> None:
    """``start`` and ``to``: bytes behind multiples of 256."""
    source = torch.randint(0, 256, (nbytes + 2 * _AROUND + 4096,), dtype=torch.uint8)
    target = torch.full((nbytes + 2 * _AROUND + 4096,), 77, dtype=torch.uint8)
    begin, at = (-tensor.data_ptr() % 4096 % _AROUND + shift for tensor, shift in ((source, start), (target, to)))
    memmove(target.data_ptr() + at, source.data_ptr() + begin, nbytes)
    assert torch.equal(target[at : at + nbytes], source[begin : begin + nbytes])
    assert target[:at].unique().tolist() in ([], [77]) and target[at + nbytes :].unique().tolist() == [77]


@pytest.mark.parametrize(
    "nbytes", [0, 1, 63, 4096, _MIB - 1, _MIB, _MIB + 1, _MIB + 63, _MIB + 65, 4 * _MIB + 127, 8 * _MIB]
)
def test_what_is_copied_is_what_was_there_and_nothing_beside_it_changes(nbytes: int) -> None:
    for start, to in ((0, 0), (4, 0), (0, 4), (8, 24), (1, 63), (63, 1)):
        _copied(start, to, nbytes)


def test_copies_of_any_length_anywhere() -> None:
    chosen = random.Random(5)
    for _ in range(60):
        _copied(chosen.randrange(200), chosen.randrange(200), _MIB - 200 + chosen.randrange(_MIB))


def test_another_thread_that_is_told_of_the_copy_reads_it() -> None:
    source, target = (torch.zeros(4 * _MIB, dtype=torch.uint8) for _ in range(2))
    told, seen = threading.Barrier(2), threading.Barrier(2)
    wrong: list[int] = []

    def read() -> None:
        for number in range(1, 50):
            told.wait(10)
            if not torch.equal(target, torch.full_like(target, number)):
                wrong.append(number)
            seen.wait(10)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    for number in range(1, 50):
        source.fill_(number)
        memmove(target.data_ptr(), source.data_ptr(), len(source))
        told.wait(10)
        seen.wait(10)
    thread.join(10)
    assert not thread.is_alive() and wrong == []


def test_large_copies_go_past_the_caches_where_this_processor_can_do_that() -> None:
    """On another the C library makes them, slower; else nobody would notice a StringZilla that has hidden its function."""
    able = not {"haswell", "skylake"}.isdisjoint(stringzilla.__capabilities__)
    assert (module._large is not ctypes.memmove) is able


@pytest.mark.parametrize("without", ["processor", "function", "library"])
def test_where_there_is_no_better_way_the_c_library_copies(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "processor":
        monkeypatch.setattr(stringzilla, "__capabilities__", ("serial", "neon"))
    else:
        monkeypatch.setattr(stringzilla, "__capabilities__", ("serial", "haswell"))
        path = "/nowhere/stringzilla.so" if without == "library" else torch._C.__file__
        monkeypatch.setattr(stringzilla, "__file__", path)
    assert module._for_large() is ctypes.memmove
