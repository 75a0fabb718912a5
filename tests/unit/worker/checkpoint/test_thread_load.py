"""What a save does beside a training leaves the processor to the training, for as long as nobody waits for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ratchet_store.write import rank_file
from ratchet_worker.checkpoint import rank_file as rank_part
from ratchet_worker.checkpoint import threads
from ratchet_worker.checkpoint.save import SaveState
from ratchet_worker.state import replica_digests
from tests.support.server import wait_for
from tests.unit.worker.checkpoint.test_saving import Group

OWN = os.getpriority(os.PRIO_PROCESS, 0)
QUIET = min(OWN + threads._NICE, 19)


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class Work:
    """By what niceness which part of a save was done, and in which threads; ``hold``: the quiet threads' writes wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, set[int]] = {"write": set(), "compare": set()}
        self.hold = threading.Event()
        self.hold.set()
        write, compared = os.pwrite, replica_digests.compare_parts

        def pwrite(fd: int, data: Any, at: int) -> int:
            self.seen["write"].add(nice())
            assert nice() == OWN or self.hold.wait(20)
            return write(fd, data, at)

        def compare(*rest: Any) -> Any:
            self.seen["compare"].add(nice())
            return compared(*rest)

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(replica_digests, "compare_parts", compare)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    monkeypatch.setattr(rank_file, "BLOCK", 4096)
    return Work(monkeypatch)


def held(tmp_path: Path, work: Work) -> Group:
    """A save of step 2 is under way beside the training, and its quiet threads come to write nothing."""
    group = Group(tmp_path, every_steps=2)
    group.step(1)
    work.hold.clear()
    group.step(2)
    return group


def test_save_during_training_runs_in_low_priority_threads(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_part, "_QUIET_WRITE_SECONDS", 30.0)
    group = Group(tmp_path, every_steps=2)
    group.step(1)
    group.step(2)
    assert all(
        save is not None and save.progress.wait_for(SaveState.RETAINING, 20)
        for save in (rank._save for rank in group.ranks)
    )
    group.drain()
    assert group.saved() == {2: 2.0} and nice() == OWN
    assert QUIET in work.seen["write"] and work.seen["compare"] == {QUIET}


def test_blocking_save_runs_at_normal_priority(tmp_path: Path, work: Work) -> None:
    group = Group(tmp_path, every_steps=None)
    group.step(1)
    outcomes = group.together(lambda rank: group.ranks[rank].save(1, "stop", True, lambda: group.content(rank, 1)))
    assert [outcome.error for outcome in outcomes] == [None, None] and group.saved() == {1: 1.0}
    assert work.seen == {"write": {OWN}, "compare": {OWN}}


def test_waiting_for_a_save_raises_writer_threads_to_normal_priority(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose processors are all busy: the quiet threads do not come to write anything."""
    monkeypatch.setattr(rank_part, "_QUIET_WRITE_SECONDS", 30.0)
    group = held(tmp_path, work)
    saves = [rank._save for rank in group.ranks]
    wait_for(lambda: work.seen["write"], "a quiet thread to come to write", 10)
    assert not any(save is None or save.progress.wait_for(SaveState.RETAINING, 0.1) for save in saves)
    before = {*work.seen["write"]}
    waiting = threading.Thread(target=group.drain, daemon=True)
    waiting.start()
    wait_for(lambda: OWN in work.seen["write"], "a thread that does not give way to write", 10)
    work.hold.set()  # a quiet thread's own block
    waiting.join(20)
    assert before == {QUIET} and group.saved() == {2: 2.0}


def test_save_moves_to_normal_priority_after_patience(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_part, "_QUIET_WRITE_SECONDS", 0.05)
    group = held(tmp_path, work)
    wait_for(lambda: OWN in work.seen["write"], "a thread that does not give way to write", 10)
    work.hold.set()
    group.drain()
    assert group.saved() == {2: 2.0}
