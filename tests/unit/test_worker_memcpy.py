"""Copies of a save are the bytes that were there, of whatever length, wherever they lie, whichever way they take."""

from __future__ import annotations

import ctypes
import random

import pytest
import stringzilla
import torch

from ratchet_worker import memcpy as module
from ratchet_worker.memcpy import memcpy

_MIB = 1 << 20
_AROUND = 256  # bytes that are not to change


def _copied(start: int, to: int, nbytes: int) -> None:
    """``start`` and ``to``: bytes behind multiples of 256."""
    source = torch.randint(0, 256, (nbytes + 2 * _AROUND + 4096,), dtype=torch.uint8)
    target = torch.full((nbytes + 2 * _AROUND + 4096,), 77, dtype=torch.uint8)
    begin, at = (-tensor.data_ptr() % _AROUND + shift for tensor, shift in ((source, start), (target, to)))
    memcpy(target.data_ptr() + at, source.data_ptr() + begin, nbytes)
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


def test_large_copies_go_past_the_caches_where_this_processor_can_do_that() -> None:
    """On another the C library makes them, slower; else nobody would notice a StringZilla that has hidden its function."""
    assert (module._large is not ctypes.memmove) is ("skylake" in stringzilla.__capabilities__)


@pytest.mark.parametrize("without", ["processor", "function", "library", "list"])
def test_where_there_is_no_better_way_the_c_library_copies(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "list":
        monkeypatch.delattr(stringzilla, "__capabilities__")
    else:
        able = ("serial", "haswell") if without == "processor" else ("serial", "haswell", "skylake")
        monkeypatch.setattr(stringzilla, "__capabilities__", able)
    if without in ("function", "library"):
        path = "/nowhere/stringzilla.so" if without == "library" else torch._C.__file__
        monkeypatch.setattr(stringzilla, "__file__", path)
    assert module._for_large() is ctypes.memmove
