"""A job's directory is listed before it gets a number; a disk that answers slowly keeps nobody else from starting."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ratchet_contract.paths import JobPaths
from ratchet_service import unrecorded
from ratchet_service.database import Database
from ratchet_service.unrecorded import Next
from tests.support.queue import Queue


def test_while_a_disk_does_not_answer_another_reconciler_hands_out_slots(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts the very job that the first one has listed: who comes second finds it started."""
    slow, other = Queue(tmp_path, database, cpus=2), Queue(tmp_path, database, cpus=2)
    first, second = slow.submit(cpus=1), slow.submit(cpus=1)
    listing, main, started = unrecorded.next_attempt, threading.current_thread(), list[str]()
    aside = threading.Thread(target=lambda: started.extend(other.round()))

    def hang(paths: JobPaths, epoch: int) -> Next:
        if threading.current_thread() is main and not started:
            aside.start()
            aside.join(10)
            assert not aside.is_alive(), "nobody else could start anything while the disk did not answer"
        return listing(paths, epoch)

    monkeypatch.setattr(unrecorded, "next_attempt", hang)
    assert slow.round() == [] and sorted(started) == sorted([first, second])
    assert [slow.job(job).epoch for job in (first, second)] == [1, 1]


def test_what_waits_for_its_directory_keeps_its_slots(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path, database, cpus=4)
    large, small = queue.submit(cpus=4), queue.submit(cpus=1)
    listing, asked = unrecorded.next_attempt, list[str]()

    def listed(paths: JobPaths, epoch: int) -> Next:
        asked.append(paths.root.name)
        return listing(paths, epoch)

    monkeypatch.setattr(unrecorded, "next_attempt", listed)
    assert queue.round() == [large] and queue.round() == []
    assert asked == [large], "the small one was to start in its place"
    assert queue.why(small)[0] == "no-slot"


def test_a_number_that_appears_on_the_disk_before_the_listing_is_not_given_again(
    tmp_path: Path, database: Database
) -> None:
    queue = Queue(tmp_path, database)
    job = queue.submit()
    checkpoints = queue.paths.job(job).checkpoints
    (checkpoints / "step-000000000010.a0007").mkdir(parents=True)
    assert queue.round() == [job] and queue.job(job).epoch == 8
