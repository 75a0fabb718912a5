"""A job's directory is listed before it gets a number; a disk that answers slowly keeps nobody else from starting."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import Event
from ratchet_service import queue_rows, queueing, unrecorded
from ratchet_service.database import Database, utc_now
from ratchet_service.foreseen import Foreseen
from ratchet_service.models import Quota
from ratchet_service.queue_rows import Row
from ratchet_service.queueing import Plan
from ratchet_service.transitions import apply
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


def test_what_changes_behind_the_look_is_seen_and_nobody_waits_for_it(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is looked at without a lock: somebody cancels the job that was to start, and another one has its slot."""
    queue = Queue(tmp_path, database, cpus=1)
    first, second, third = (queue.submit() for _ in range(3))
    look, changed = Foreseen.plan, list[str]()

    def plan(self: Foreseen) -> Plan:
        found = look(self)
        if not changed:
            changed.append(next(iter(found.starts))[0])
            with database.write() as session:  # it would wait for the lock
                apply(session, first, Event.CANCEL)
        return found

    monkeypatch.setattr(Foreseen, "plan", plan)
    assert queue.round() == [second] and changed == [first]
    assert queue.round() == [] and queue.why(third)[0] == "no-slot"


def test_a_look_that_finds_nothing_to_do_writes_nothing(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path, database, cpus=1)
    runs, *waiting = (queue.submit() for _ in range(4))
    assert queue.round() == [runs]

    def write() -> None:
        raise AssertionError("a look writes that has nothing to say")

    with monkeypatch.context() as patched:
        patched.setattr(database, "write", write)
        assert queue.round() == []
    assert {queue.why(job)[0] for job in waiting} == {"no-slot"}


def test_who_comes_behind_a_job_that_keeps_the_free_slots_is_told_so_once(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path, database, cpus=4)
    assert queue.round() == [] and queue.submit() in queue.round()
    large = queue.submit(cpus=4)
    assert queue.round() == [] and queue.why(large)[0] == "no-slot"
    small = queue.submit()
    assert queue.round() == []
    assert queue.why(small) == ("no-slot", "waits for CPU slots: all 4 are taken, or kept for jobs ahead of it")
    monkeypatch.setattr(database, "write", None)
    assert queue.round() == [], "and nothing is left to say"


def test_very_many_are_told_in_several_looks_why_they_wait(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no look keeps others from the database for long."""
    monkeypatch.setattr(queue_rows, "TOLD", 2)
    queue = Queue(tmp_path, database, cpus=1)
    runs, *waiting = (queue.submit() for _ in range(6))
    assert queue.round() == [runs]
    told = [sum(queue.why(job)[0] == "no-slot" for job in waiting)]
    for _ in range(2):
        assert queue.round() == []
        told.append(sum(queue.why(job)[0] == "no-slot" for job in waiting))
    assert told[0] < told[1] < len(waiting) == told[2], told


def test_a_directory_that_cannot_be_read_keeps_nobody_whose_own_can_be_read_again(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both could not be made, and there is one slot: the older one fails again in every look."""
    queue = Queue(tmp_path, database, cpus=1)
    older, newer = queue.submit(), queue.submit()
    listing, unreadable, asked = unrecorded.next_attempt, {older, newer}, list[str]()

    def listed(paths: JobPaths, epoch: int) -> Next:
        asked.append(paths.root.name)
        if paths.root.name in unreadable:
            raise OSError("the disk does not answer")
        return listing(paths, epoch)

    monkeypatch.setattr(unrecorded, "next_attempt", listed)
    assert queue.round() == [] and {queue.why(job)[0] for job in (older, newer)} == {queue_rows.UNMADE}
    asked.clear()
    assert queue.round() == [] and asked == [older, newer], "each is tried once in a look"
    unreadable.remove(newer)
    assert queue.round() == [newer]


def test_whose_quota_is_used_up_takes_no_part_in_what_others_are_started_for(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait so: the transaction reads none of those that know it, and tells it to some in each look."""
    monkeypatch.setattr(queueing, "SAID", 3)
    queue = Queue(tmp_path, database, cpus=4)
    with database.write() as session:
        session.add(Quota(owner="ada", jobs=1, updated_at=utc_now()))
    runs, *waiting = (queue.submit(owner="ada") for _ in range(6))
    assert queue.round() == [runs]
    told = [sum(queue.why(job)[0] == "quota" for job in waiting)]
    for _ in range(3):  # what is held has changed with the first one: it is told in the second one
        assert queue.round() == []
        told.append(sum(queue.why(job)[0] == "quota" for job in waiting))
    assert told == [3, 3, 5, 5]
    read, these = list[str](), queue_rows.these

    def reads(session: Session, now: datetime, kinds: Collection[str] | None, ids: Sequence[str]) -> list[Row]:
        read.extend(ids)
        return these(session, now, kinds, ids)

    monkeypatch.setattr(queue_rows, "these", reads)
    other = queue.submit(owner="bob")
    assert queue.round() == [other] and read == [other]
    queue.end(runs)
    assert queue.round() == [waiting[0]], "and whose owner's quota is free again starts in their order"
