"""A job's directory is listed before it gets a number; a disk that answers slowly keeps nobody else from starting."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import Event
from ratchet_service.checkpoints import run_directory_scan
from ratchet_service.checkpoints.run_directory_scan import Next
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Job, Quota
from ratchet_service.db.transitions import apply
from ratchet_service.reconciler import launch
from ratchet_service.scheduling import queue_queries, scheduler
from ratchet_service.scheduling.scheduler import CREATION_FAILED, QueueState, Row, Schedule
from tests.support.queue_harness import Queue


def test_second_reconciler_launches_jobs_while_the_first_waits_for_its_disk(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts the very job that the first one has listed: who comes second finds it started."""
    slow, other = Queue(tmp_path, database, cpus=2), Queue(tmp_path, database, cpus=2)
    first, second = slow.submit(cpus=1), slow.submit(cpus=1)
    listing, main, started = run_directory_scan.next_attempt, threading.current_thread(), list[str]()
    aside = threading.Thread(target=lambda: started.extend(other.run_round()))

    def hang(paths: JobPaths, attempt: int) -> Next:
        if threading.current_thread() is main and not started:
            aside.start()
            aside.join(10)
            assert not aside.is_alive(), "nobody else could start anything while the disk did not answer"
        return listing(paths, attempt)

    monkeypatch.setattr(run_directory_scan, "next_attempt", hang)
    assert slow.run_round() == [] and sorted(started) == sorted([first, second])
    assert [slow.job(job).attempt for job in (first, second)] == [1, 1]


def test_job_waiting_for_its_directory_listing_keeps_its_slots(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path, database, cpus=4)
    large, small = queue.submit(cpus=4), queue.submit(cpus=1)
    listing, asked = run_directory_scan.next_attempt, list[str]()

    def listed(paths: JobPaths, attempt: int) -> Next:
        asked.append(paths.root.name)
        return listing(paths, attempt)

    monkeypatch.setattr(run_directory_scan, "next_attempt", listed)
    assert queue.run_round() == [large] and queue.run_round() == []
    assert asked == [large], "the small one was to start in its place"
    assert queue.reason_and_message(small)[0] == "no-slot"


def test_attempt_number_found_on_disk_is_not_reused(tmp_path: Path, database: Database) -> None:
    queue = Queue(tmp_path, database)
    job = queue.submit()
    checkpoints = queue.paths.job(job).checkpoints
    (checkpoints / "step-000000000010.a0007").mkdir(parents=True)
    assert queue.run_round() == [job] and queue.job(job).attempt == 8


def test_job_changed_after_the_scheduling_pass_is_left_to_the_next_pass(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is looked at without a lock: somebody cancels the job that was to start, and another one has its slot."""
    queue = Queue(tmp_path, database, cpus=1)
    first, second, third = (queue.submit() for _ in range(3))
    decide, changed = scheduler.schedule, list[str]()

    def schedule(queue_: QueueState, *settings: Any) -> Schedule:
        found = decide(queue_, *settings)
        if not changed:
            changed.append(found.starts[0].row.queued.job)
            with database.write() as session:  # it would wait for the lock
                apply(session, first, Event.CANCEL)
        return found

    monkeypatch.setattr(scheduler, "schedule", schedule)
    assert queue.run_round() == [second] and changed == [first]
    assert queue.run_round() == [] and queue.reason_and_message(third)[0] == "no-slot"


def test_scheduling_pass_without_changes_writes_nothing(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path, database, cpus=1)
    runs, *waiting = (queue.submit() for _ in range(4))
    assert queue.run_round() == [runs]

    def write() -> None:
        raise AssertionError("a look writes that has nothing to say")

    with monkeypatch.context() as patched:
        patched.setattr(database, "write", write)
        assert queue.run_round() == []
    assert {queue.reason_and_message(job)[0] for job in waiting} == {"no-slot"}


def test_job_behind_a_slot_reservation_gets_its_wait_reason_once(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path, database, cpus=4)
    assert queue.run_round() == [] and queue.submit() in queue.run_round()
    large = queue.submit(cpus=4)
    assert queue.run_round() == [] and queue.reason_and_message(large)[0] == "no-slot"
    small = queue.submit()
    assert queue.run_round() == []
    assert queue.reason_and_message(small) == (
        "no-slot",
        "waits for CPU slots: all 4 are in use or reserved for jobs ahead of it",
    )
    monkeypatch.setattr(database, "write", None)
    assert queue.run_round() == [], "and nothing is left to say"


def test_wait_reasons_of_many_jobs_are_written_over_several_passes(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no look keeps others from the database for long."""
    monkeypatch.setattr(queue_queries, "MAX_REASONS_PER_PASS", 2)
    queue = Queue(tmp_path, database, cpus=1)
    runs, *waiting = (queue.submit() for _ in range(6))
    assert queue.run_round() == [runs]
    told = [sum(queue.reason_and_message(job)[0] == "no-slot" for job in waiting)]
    for _ in range(2):
        assert queue.run_round() == []
        told.append(sum(queue.reason_and_message(job)[0] == "no-slot" for job in waiting))
    assert told[0] < told[1] < len(waiting) == told[2], told


def test_unreadable_job_directory_does_not_block_other_jobs(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both could not be made, and there is one slot: the older one fails again in every look."""
    queue = Queue(tmp_path, database, cpus=1)
    older, newer = queue.submit(), queue.submit()
    listing, unreadable, asked = run_directory_scan.next_attempt, {older, newer}, list[str]()

    def listed(paths: JobPaths, attempt: int) -> Next:
        asked.append(paths.root.name)
        if paths.root.name in unreadable:
            raise OSError("the disk does not answer")
        return listing(paths, attempt)

    monkeypatch.setattr(run_directory_scan, "next_attempt", listed)
    assert queue.run_round() == [] and {queue.reason_and_message(job)[0] for job in (older, newer)} == {CREATION_FAILED}
    asked.clear()
    assert queue.run_round() == [] and asked == [older, newer], "each is tried once in a look"
    unreadable.remove(newer)
    assert queue.run_round() == [newer]


def test_jobs_over_quota_are_not_locked_when_others_are_launched(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait so: the transaction locks none of them, and stores the reason for some in each pass."""
    monkeypatch.setattr(scheduler, "MAX_REASONS_STORED", 3)
    queue = Queue(tmp_path, database, cpus=4)
    with database.write() as session:
        session.add(Quota(owner="ada", jobs=1, updated_at=utc_now()))
    runs, *waiting = (queue.submit(owner="ada") for _ in range(6))
    assert queue.run_round() == [runs]
    told = [sum(queue.reason_and_message(job)[0] == "quota" for job in waiting)]
    for _ in range(3):  # what is held has changed with the first one: it is told in the second one
        assert queue.run_round() == []
        told.append(sum(queue.reason_and_message(job)[0] == "quota" for job in waiting))
    assert told == [3, 3, 5, 5]
    locked, lock = list[str](), launch.locked_job

    def recorded(session: Session, row: Row) -> Job | None:
        locked.append(row.queued.job)
        return lock(session, row)

    monkeypatch.setattr(launch, "locked_job", recorded)
    other = queue.submit(owner="bob")
    assert queue.run_round() == [other] and locked == [other]
    queue.end(runs)
    assert queue.run_round() == [waiting[0]], "and whose owner's quota is free again starts in their order"
