"""The file of copies in memory: two slots suffice, whatever the ranks' order and wherever one is killed."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator

import pytest

from ratchet_contract.errors import CheckpointError
from ratchet_worker.ipc import memory_copies
from ratchet_worker.ipc.memory_copies import Board, Result

RANKS, COPIES = 3, 12


@pytest.fixture
def file() -> Iterator[int]:
    fd = memory_copies.create(RANKS)
    yield fd
    os.close(fd)


def rank_of(fd: int, rank: int, done: dict[int, set[int]], source: random.Random) -> Iterator[None]:
    """What a rank does, in the parts between which it may be killed or overtaken. ``done``: ranks that have a copy, by number."""
    board = Board(f"/proc/self/fd/{fd}", rank, RANKS)
    while board.number < COPIES:
        while None in board.results():
            yield
        place = memory_copies.slot_offset(rank, board.begin())
        yield
        os.pwrite(fd, bytes([board.number]) * 5, place)
        yield
        failed = source.random() < 0.2
        if not failed:
            board.publish(10 * board.number, 5, b"head", {"rank": rank, "number": board.number})
            done.setdefault(board.number, set()).add(rank)
        yield
        board.set_result(Result.FAILED if failed else Result.DONE)


@pytest.mark.parametrize("seed", range(20))
def test_newest_copy_of_all_ranks_survives_every_order_of_their_writes(file: int, seed: int) -> None:
    source, done = random.Random(seed), dict[int, set[int]]()
    ranks = [rank_of(file, rank, done, source) for rank in range(RANKS)]
    speeds = [source.random() for _ in ranks]
    while ranks:
        (chosen,) = source.choices(ranks, speeds[: len(ranks)])
        if next(chosen, "ended") == "ended":
            ranks.remove(chosen)
        whole = max((number for number, found in done.items() if len(found) == RANKS), default=0)
        assert memory_copies.newest(file, RANKS) == whole  # a kill now leaves this one
        for rank in range(RANKS) if whole else ():
            copy = memory_copies.read(file, rank, whole)
            assert (copy.step, bytes(copy.data), copy.header) == (10 * whole, bytes([whole]) * 5, b"head")
            assert copy.description == {"rank": rank, "number": whole}
    assert memory_copies.newest(file, RANKS) > COPIES - 8


def test_file_is_sealed_only_when_no_process_can_write_to_it(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copies, "_SEAL_SECONDS", 0.0)
    with mmap.mmap(file, 4096, mmap.MAP_SHARED), pytest.raises(OSError, match="busy"):
        memory_copies.seal(file)
    memory_copies.seal(file)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 0)


def test_damaged_description_is_refused(file: int) -> None:
    board = Board(f"/proc/self/fd/{file}", 1, RANKS)
    place = memory_copies.slot_offset(1, board.begin())
    board.publish(7, 4096, b"head", {"a": 1})
    assert memory_copies.read(file, 1, 1).description == {"a": 1}
    os.pwrite(file, b"?", place + 4096 + 2)
    with pytest.raises(CheckpointError, match="rank 1 in memory is damaged"):
        memory_copies.read(file, 1, 1)
