"""The queue changes while the next attempts' directories are read, between a scheduling pass and its transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet_contract.api.requests import PatchRequest
from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import Cause, Event, JobPhase, Reason
from ratchet_service.checkpoints import run_directory_scan
from ratchet_service.checkpoints.run_directory_scan import Next
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Attempt, Job, Quota
from ratchet_service.db.transitions import apply
from ratchet_service.usecases import update_job
from tests.support.queue_harness import Queue


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have something done once, after a pass has decided and before its transaction."""

    def install(action: Callable[[], object]) -> None:
        listing, left = run_directory_scan.next_attempt, [action]

        def listed(paths: JobPaths, attempt: int) -> Next:
            if left:
                left.pop()()
            return listing(paths, attempt)

        monkeypatch.setattr(run_directory_scan, "next_attempt", listed)

    return install


def set_quota(database: Database, owner: str, **limits: int) -> None:
    with database.write() as session:
        session.merge(Quota(owner=owner, updated_at=utc_now(), **limits))


def break_directory(monkeypatch: pytest.MonkeyPatch, job_id: str) -> None:
    listing = run_directory_scan.next_attempt

    def listed(paths: JobPaths, attempt: int) -> Next:
        if paths.root.name == job_id:
            raise OSError("the disk does not answer")
        return listing(paths, attempt)

    monkeypatch.setattr(run_directory_scan, "next_attempt", listed)


def break_spec(queue: Queue, job_id: str) -> None:
    queue.set_columns(job_id, spec={**queue.job(job_id).spec, "bogus": 1})


@pytest.mark.parametrize("change", [{"priority": 9}, {"labels": {"a": "b"}}], ids=["priority", "labels"])
def test_job_patched_meanwhile_starts_before_a_lower_one(
    tmp_path: Path, database: Database, meanwhile: Any, change: dict[str, Any]
) -> None:
    queue = Queue(tmp_path, database, cpus=1)
    high, _ = queue.submit(priority=5), queue.submit()

    def patch() -> None:
        with database.write() as session:
            update_job.patch(session, high, PatchRequest(**change), None)

    meanwhile(patch)
    assert queue.run_round() == [high]


def test_slots_reserved_for_a_large_job_stay_reserved_when_another_takes_one(
    tmp_path: Path, database: Database, meanwhile: Any
) -> None:
    queue, other = Queue(tmp_path, database, cpus=2), Queue(tmp_path, database, cpus=2)
    _, small = queue.submit(cpus=2, priority=5), queue.submit(cpus=1)

    def take_a_slot() -> None:
        taking = queue.submit(priority=9)
        assert other.run_round() == [taking]

    meanwhile(take_a_slot)
    assert small not in queue.run_round()


@pytest.mark.parametrize("event", ["slot freed", "first cancelled", "quota lowered", "victim ended"])
def test_nothing_is_stopped_for_a_job_if_what_the_stop_was_decided_from_has_changed(
    tmp_path: Path, database: Database, meanwhile: Any, event: str
) -> None:
    queue = Queue(tmp_path, database, cpus=3, scope="any")
    victim, other = queue.submit(owner="bob"), queue.submit(priority=9)
    assert set(queue.run_round()) == {victim, other}
    first, high = queue.submit(priority=8), queue.submit(priority=5, owner="ada")

    def change() -> None:
        if event == "slot freed":
            queue.end(other)
        elif event == "quota lowered":
            set_quota(database, "ada", jobs=0)
        with database.write() as session:
            if event == "first cancelled":
                apply(session, first, Event.CANCEL)
            elif event == "victim ended":
                session.get_one(Attempt, (victim, 1)).results = {"0": {"cause": "exception"}}

    meanwhile(change)
    queue.run_round()
    assert queue.stopping() == set() and queue.job(high).reason != Reason.NO_SLOT


def test_stop_is_requested_although_another_creation_fails_and_others_start(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path, database, cpus=16, gpus=1, scope="any")
    victim = queue.submit(device="cuda")
    assert queue.run_round() == [victim]
    break_directory(monkeypatch, queue.submit())
    queue.run_round()
    high, hopeless = queue.submit(device="cuda", priority=5), queue.submit(device="cuda", ranks=3, priority=5)
    started = queue.submit()
    assert queue.run_round() == [started] and queue.stopping() == {victim}
    assert queue.reason_and_message(high)[1].endswith("; slots are being freed for it")
    assert queue.reason_and_message(hopeless)[0] == Reason.NO_SLOT


def test_stop_is_requested_on_a_busy_service(tmp_path: Path, database: Database, meanwhile: Any) -> None:
    """Another attempt starts and one ends between the pass and its transaction."""
    queue = Queue(tmp_path, database, cpus=16, gpus=1, scope="any")
    victim, short = queue.submit(device="cuda"), queue.submit()
    assert set(queue.run_round()) == {victim, short}
    queue.submit(device="cuda", priority=5)
    meanwhile(lambda: queue.end(short))
    started = queue.submit()
    assert queue.run_round() == [started] and queue.stopping() == {victim}


def test_nothing_is_stopped_if_a_job_ahead_has_left_its_reserved_slot(
    tmp_path: Path, database: Database, meanwhile: Any
) -> None:
    queue = Queue(tmp_path, database, cpus=5, scope="any")
    running = [queue.submit(), queue.submit(priority=9), queue.submit(priority=9)]
    assert set(queue.run_round()) == set(running)
    with database.write() as session:
        apply(session, running[1], Event.PREEMPT, cause=Cause.API_PREEMPT)
    first, ahead = queue.submit(priority=9), queue.submit(priority=8, cpus=2)
    queue.submit(priority=5)

    def cancel() -> None:
        with database.write() as session:
            apply(session, ahead, Event.CANCEL)

    meanwhile(cancel)
    queue.run_round()
    assert queue.job(first).attempt == 1 and running[0] not in queue.stopping()


def test_job_starts_although_its_owner_holds_more_gpus_than_a_lowered_quota(tmp_path: Path, database: Database) -> None:
    queue = Queue(tmp_path, database, cpus=8, gpus=4)
    runs = queue.submit(owner="ada", ranks=4, device="cuda")
    assert queue.run_round() == [runs]
    set_quota(database, "ada", gpus=2)
    without_gpus = queue.submit(owner="ada")
    assert queue.run_round() == [without_gpus]


def test_quota_of_a_job_whose_attempt_cannot_be_created_stays_reserved(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path, database, cpus=8)
    set_quota(database, "ada", jobs=1)
    first, second = queue.submit(owner="ada"), queue.submit(owner="ada")
    break_directory(monkeypatch, first)
    assert [queue.run_round() for _ in range(3)] == [[], [], []]
    assert queue.reason_and_message(second)[0] == Reason.QUOTA


def test_reasons_are_not_rewritten_while_an_attempt_cannot_be_created(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path, database, cpus=8)
    set_quota(database, "ada", ranks=4)
    runs = queue.submit(owner="ada", ranks=2)
    assert queue.run_round() == [runs]
    failing, _ = queue.submit(owner="ada", ranks=2), queue.submit(owner="ada", ranks=3)
    break_directory(monkeypatch, failing)
    for _ in range(2):
        queue.run_round()
    written: list[str] = []

    def record(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE jobs"):
            written.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", record)
    try:
        queue.run_round()
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", record)
    assert written == []


def test_unreadable_job_fails_at_once_and_nothing_is_stopped_for_it(tmp_path: Path, database: Database) -> None:
    queue = Queue(tmp_path, database, cpus=1)
    low = queue.submit()
    assert queue.run_round() == [low]
    high = queue.submit(priority=5)
    break_spec(queue, high)
    assert queue.run_round() == [] and queue.stopping() == set()
    assert (queue.job(high).phase, queue.job(high).reason) == (JobPhase.FAILED, Reason.SPEC_UNREADABLE)


@pytest.mark.parametrize(
    "spec, resolved",
    [
        ({"world": None}, {}),
        ({"world": {"nodes": 1, "ranks_per_node": "a"}}, {}),
        ({"world": {"nodes": 1, "ranks_per_node": -1}}, {}),
        ({"world": {"nodes": 1, "ranks_per_node": 1e300}}, {}),
        ({"policy": 3}, {}),
        ({"policy": {"timeout": {"a": 1}}}, {}),
        ({"policy": {"timeout": "x"}}, {}),
        ({}, {"threads_per_rank": None}),
    ],
)
def test_unreadable_row_keeps_no_other_job_from_starting(
    tmp_path: Path, database: Database, spec: dict[str, Any], resolved: dict[str, Any]
) -> None:
    queue = Queue(tmp_path, database, cpus=1)
    bad, good = queue.submit(priority=5), queue.submit()
    job = queue.job(bad)
    queue.set_columns(bad, spec={**job.spec, **spec}, resolved={**job.resolved, **resolved})
    assert queue.run_round() == [good] and queue.job(bad).reason == Reason.SPEC_UNREADABLE


@pytest.mark.parametrize("cpus", [1, 2], ids=["not compared", "compared"])
def test_round_does_not_wait_for_the_locked_row_of_a_waiting_job(tmp_path: Path, database: Database, cpus: int) -> None:
    if database.is_sqlite:
        pytest.skip("of PostgreSQL: SQLite has one writer at a time, whatever it writes")
    queue = Queue(tmp_path, database, cpus=cpus)
    runs = queue.submit()
    assert queue.run_round() == [runs]
    waiting = queue.submit(cpus=cpus)
    assert not queue.waits_for_row(waiting)


def test_round_and_a_transaction_that_locks_jobs_in_another_order_do_not_deadlock(
    tmp_path: Path, database: Database
) -> None:
    if database.is_sqlite:
        pytest.skip("of PostgreSQL: SQLite has one writer at a time, whatever it writes")
    queue = Queue(tmp_path, database, cpus=3)
    runs = queue.submit()
    assert queue.run_round() == [runs]
    starts, waiting = queue.submit(), queue.submit(cpus=3)
    started: list[str] = []
    with database.write() as session:
        session.scalar(sa.select(Job.id).where(Job.id == waiting).with_for_update())
        aside = threading.Thread(target=lambda: started.extend(queue.run_round()))
        aside.start()
        aside.join(30)  # with a fault, it still waits then
        session.scalar(sa.select(Job.id).where(Job.id == starts).with_for_update())
    aside.join(30)
    assert started == [starts]
