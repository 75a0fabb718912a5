"""The wall clock is set while jobs run: no healthy job is ended for it, and none loses an attempt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from ratchet_contract.phases import JobPhase
from ratchet_service import clock as clocks
from ratchet_service import expiry, leases, reconciler, watching
from ratchet_service import jumps as jumps_
from ratchet_service.clock import Clock
from ratchet_service.database import Database
from ratchet_service.expiry import Expiry
from ratchet_service.jumps import Jumps
from ratchet_service.models import ClockLevel, Job
from ratchet_service.reconciler import Reconciler
from ratchet_service.watched import Timing
from tests.support.plane import Plane
from tests.support.server import wait_for


class SetClock(Clock):
    """Of this machine; with SQLite the server's, too."""

    ahead = 0.0
    server_ahead = 0.0
    """Of a server that has a clock of its own."""
    passed = 0.0
    """Beyond what has passed in truth; ``ahead`` has it, too."""
    machine = "here"

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.ahead)

    def monotonic(self) -> float:
        return time.monotonic() + self.passed

    def boot(self) -> str:
        return self.machine

    def of_server(self, session: Session) -> datetime:
        lite = session.get_bind().dialect.name == "sqlite"
        return self.now() if lite else super().of_server(session) + timedelta(seconds=self.server_ahead)

    def jumps(self, seconds: float) -> None:
        """All wall clocks do."""
        self.ahead, self.server_ahead = self.ahead + seconds, self.server_ahead + seconds

    def passes(self, seconds: float) -> None:
        """In truth."""
        self.passed += seconds
        self.jumps(seconds)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def plane(tmp_path: Path, database: Database, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    monkeypatch.setattr(database, "clock", clock)
    monkeypatch.setattr(database, "_info", clocks.info(clock))
    made = Plane(tmp_path, database)
    made.serve_api()
    yield made
    made.close()


def looks(made: Reconciler) -> None:
    """Two rounds, of which the second began after now."""
    for _ in range(2):
        last = made.beat.succeeded
        wait_for(lambda: made.beat.succeeded != last, "another round", 30)  # noqa: B023


def gone(plane: Plane, job_id: str) -> bool:
    with plane.database.read() as session:
        return session.get(Job, job_id) is None


def jumps(plane: Plane, job_id: str) -> list[float]:
    return [event.data["seconds"] for event in plane.events(job_id) if event.type == "clock-jumped"]


@pytest.mark.parametrize("by", [7200.0, -7200.0])
def test_a_job_with_a_time_limit_outlives_a_jump_and_a_restart_after_it(
    plane: Plane, clock: SetClock, by: float
) -> None:
    first = plane.reconcile()
    job_id = plane.submit({"steps": 100_000, "every": 50}, policy={"timeout": "10m"})
    plane.wait_job(job_id, lambda job: job.step > 0, "training")
    clock.ahead = by
    wait_for(lambda: jumps(plane, job_id), "the jump to be told", 30)
    assert abs(jumps(plane, job_id)[0] - by) < 5
    first.stop()
    wait_for(lambda: plane.job(job_id).lease_token is None, "the first reconciler to end", 30)
    plane.reconcile()
    there = wait_for(lambda: plane.job(job_id).lease_token, "another to take it over", 30)
    step = plane.job(job_id).step
    plane.wait_job(job_id, lambda job: job.step > step + 50, "training on")
    job, (attempt,) = plane.job(job_id), plane.attempts(job_id)
    assert (job.phase, job.epoch, job.lease_token) == (JobPhase.RUNNING, 1, there) and attempt.ended_at is None
    plane.post(f"/v1/jobs/{job_id}/suspend")
    job = plane.wait(job_id, JobPhase.SUSPENDED)
    assert (job.failures, job.preemptions) == (0, 0) and 0 <= job.running_seconds < 600
    assert len(jumps(plane, job_id)) == 1


def test_a_stop_that_is_under_way_keeps_its_time(plane: Plane, clock: SetClock) -> None:
    """The rank does not hear of it; once ``stop_grace`` is over it would be ended by force, as hanging."""
    made = plane.reconcile(timing=Timing(kill_after=60.0))
    job_id = plane.submit({"steps": 100_000, "epochs": {"1": {"at": 3, "do": "deaf"}}}, policy={"stop_grace": "5m"})
    plane.wait_job(job_id, lambda job: job.step > 3, "training")
    plane.post(f"/v1/jobs/{job_id}/suspend")
    plane.wait(job_id, JobPhase.STOPPING)
    looks(made)
    clock.ahead = 3600.0
    wait_for(lambda: jumps(plane, job_id), "the jump to be told", 30)
    looks(made)
    types = {event.type for event in plane.events(job_id)}
    assert not types & {"agent-stopped", "agent-killed"} and plane.job(job_id).phase is JobPhase.STOPPING


@pytest.mark.parametrize("by", [3600.0, -3600.0])
def test_what_waits_to_be_tried_again_waits_for_as_long_as_before(plane: Plane, clock: SetClock, by: float) -> None:
    job_id = plane.submit({"steps": 5})
    with plane.database.write() as session:
        until = clock.now() + timedelta(seconds=200)
        session.execute(sa.update(Job).where(Job.id == job_id).values(not_before=until))
    made = plane.reconcile()
    looks(made)
    clock.ahead = by
    wait_for(lambda: plane.job(job_id).not_before != until, "the jump to be seen", 30)
    moved = plane.job(job_id).not_before
    assert moved is not None
    assert abs((moved - until).total_seconds() - by) < 5
    looks(made)
    assert plane.job(job_id).phase is JobPhase.QUEUED


def test_a_jump_while_the_database_is_away_counts_once_it_answers(
    plane: Plane, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a machine goes on that had stood still: its connections are broken."""
    monkeypatch.setattr(reconciler, "_ERROR_PAUSE", 0.01)
    job_id, until = plane.submit({"steps": 5}), clock.now() + timedelta(seconds=200)
    with plane.database.write() as session:
        session.execute(sa.update(Job).where(Job.id == job_id).values(not_before=until))
    made = plane.reconcile()
    looks(made)
    put_off, asked = made._launching.put_off, list[float]()

    def away(session: Session, seconds: float) -> None:
        asked.append(seconds)
        if len(asked) < 3:
            raise OperationalError("UPDATE", {}, Exception("the connection is closed"))
        put_off(session, seconds)

    monkeypatch.setattr(made._launching, "put_off", away)
    clock.ahead = 3600.0
    wait_for(lambda: made.beat.jump, "the jump to be seen", 30)
    looks(made)
    job = plane.job(job_id)
    assert job.not_before is not None and abs((job.not_before - until).total_seconds() - 3600) < 5
    assert (job.phase, len(asked)) == (JobPhase.QUEUED, 3)


def test_what_a_job_with_a_time_limit_has_run_is_known_on_another_machine(plane: Plane, clock: SetClock) -> None:
    """Whose clock counts from another start, and nobody told it when the attempt began."""

    def kept() -> float:
        (attempt,) = plane.attempts(job_id)
        return float((attempt.clocks or {}).get("run", {}).get("seconds", 0.0))

    first = plane.reconcile()
    job_id = plane.submit({"steps": 100_000, "every": 50}, policy={"timeout": "10m"})
    plane.wait_job(job_id, lambda job: job.step > 0, "training")
    looks(first)
    clock.passes(400.0)
    wait_for(lambda: kept() >= 400.0, "its count to be kept", 30)
    first.stop()
    wait_for(lambda: plane.job(job_id).lease_token is None, "the first reconciler to end", 30)
    clock.machine, clock.passed = "there", 0.0
    second = plane.reconcile()
    wait_for(lambda: plane.job(job_id).lease_token, "another to take it over", 30)
    looks(second)
    assert plane.job(job_id).phase is JobPhase.RUNNING
    clock.passes(250.0)
    assert plane.wait(job_id, JobPhase.FAILED).reason == "timeout"


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiry, "interval", 0.05)
    monkeypatch.setattr(reconciler, "IDLE_INTERVAL", 0.05)


def over(plane: Plane) -> None:
    """The newest reconciler ends, and has given back what it had."""
    made, thread = plane.reconcilers[-1]
    made.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_two_reconcilers_of_one_machine_put_off_what_waits_once_and_only_what_is_theirs(
    plane: Plane, clock: SetClock
) -> None:
    mine, foreign = plane.submit({"steps": 5}), plane.submit({"steps": 5})
    until = clock.now() + timedelta(seconds=200)
    with plane.database.write() as session:
        session.execute(sa.update(Job).values(not_before=until))
        job = session.get_one(Job, foreign)
        job.spec = {**job.spec, "launcher": {"kind": "slurm"}}
    made = [plane.reconcile() for _ in range(2)]
    for one in made:
        looks(one)
    clock.jumps(100.0)
    for one in made:
        wait_for(lambda: one.beat.jump, "the jump to be seen", 30)  # noqa: B023
    over(plane)
    looks(plane.reconcile())  # which starts behind it
    moved = plane.job(mine).not_before
    assert moved is not None and abs((moved - until).total_seconds() - 100.0) < 5
    others = plane.job(foreign).not_before  # on a server it may be another machine's, whose clock has not jumped
    assert others == (moved if plane.database.is_sqlite else until)


def test_a_jump_while_nobody_was_there_puts_off_what_waits(plane: Plane, clock: SetClock) -> None:
    job_id, until = plane.submit({"steps": 5}), clock.now() + timedelta(seconds=200)
    with plane.database.write() as session:
        session.execute(sa.update(Job).values(not_before=until))
    looks(plane.reconcile())
    over(plane)
    clock.jumps(3600.0)
    looks(plane.reconcile())
    moved = plane.job(job_id).not_before
    assert moved is not None and abs((moved - until).total_seconds() - 3600.0) < 5
    assert plane.job(job_id).phase is JobPhase.QUEUED


def test_a_jump_is_told_to_all_that_runs_in_one_transaction(
    plane: Plane, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the job that another reconciler has by then is left to it."""
    made = plane.reconcile()
    jobs = [plane.submit({"steps": 100_000, "every": 50}) for _ in range(3)]
    for job_id in jobs:
        plane.wait_job(job_id, lambda job: job.step > 0, "training")
    add, sessions = watching.add_event, list[Session]()

    def added(session: Session, job_id: str, type_: str, *rest: Any, **more: Any) -> None:
        if type_ == watching.JUMPED:
            sessions.append(session)
        add(session, job_id, type_, *rest, **more)

    monkeypatch.setattr(watching, "add_event", added)
    with plane.database.write() as session:  # which the reconciler waits for
        clock.ahead = 3600.0
        job = session.get_one(Job, jobs[0], with_for_update=True)
        expires = leases.database_now(session) + timedelta(minutes=5)
        job.lease_token, job.lease_owner, job.lease_expires_at = "another's", "another", expires
    wait_for(lambda: jumps(plane, jobs[2]), "the jump to be told", 30)
    assert [len(jumps(plane, job_id)) for job_id in jobs] == [0, 1, 1]
    assert jobs[0] not in made._watches and len({id(session) for session in sessions}) == 1


@pytest.mark.parametrize("when", ["seen", "unseen", "started-anew"])
def test_nothing_is_deleted_at_its_ttl_right_after_a_jump(
    plane: Plane, clock: SetClock, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Not by a process that starts behind it, be it that nobody was there when it came, or that the machine was started anew:
    a clock that was set wrong may be set right by then."""
    quick(monkeypatch)
    looks(plane.reconcile())
    job_id = plane.submit({"steps": 5}, ttl="1h")
    plane.wait(job_id, JobPhase.SUCCEEDED)
    looks(plane.reconcilers[-1][0])
    if when == "seen":
        clock.jumps(7200.0)
        wait_for(lambda: plane.reconcilers[-1][0].beat.jump, "the jump to be seen", 30)
        looks(plane.reconcilers[-1][0])
        assert plane.job(job_id).phase is JobPhase.SUCCEEDED
    over(plane)
    if when != "seen":
        clock.jumps(7200.0)
    if when == "started-anew":
        clock.machine, clock.passed = "there", 1.0 - time.monotonic()  # a second after its start
    looks(plane.reconcile())
    assert plane.job(job_id).phase is JobPhase.SUCCEEDED
    over(plane)
    clock.passes(expiry.RESTS - 10.0)
    looks(plane.reconcile())
    assert plane.job(job_id).phase is JobPhase.SUCCEEDED
    clock.passes(20.0)
    wait_for(lambda: gone(plane, job_id), "its ttl", 30)


@pytest.mark.parametrize("migrated", ["postgresql"], indirect=True)
def test_a_clock_that_jumps_beside_the_databases_deletes_nothing(
    plane: Plane, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    made = plane.reconcile()
    job_id = plane.submit({"steps": 5}, ttl="1h")
    plane.wait(job_id, JobPhase.SUCCEEDED)
    looks(made)
    clock.ahead = 7200.0
    wait_for(lambda: made.beat.jump, "the jump to be seen", 30)
    clock.passes(expiry.RESTS + 10.0)
    looks(made)
    assert plane.job(job_id).phase is JobPhase.SUCCEEDED
    clock.passes(3600.0)
    wait_for(lambda: gone(plane, job_id), "its ttl", 30)


def test_a_service_that_is_restarted_beside_a_right_clock_deletes_at_the_ttl(
    plane: Plane, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    looks(plane.reconcile())
    job_id = plane.submit({"steps": 5}, ttl="1h")
    plane.wait(job_id, JobPhase.SUCCEEDED)
    over(plane)
    clock.passes(3700.0)
    plane.reconcile()
    wait_for(lambda: gone(plane, job_id), "its ttl", 30)


def test_a_process_that_runs_for_months_sees_a_jump_though_its_machines_row_was_forgotten(database: Database) -> None:
    clock, other = SetClock(), SetClock()
    other.machine = "there"

    def settle(process: Jumps) -> tuple[float, bool]:
        with database.write() as session:
            seen = process.settle(session)
        process.settled(seen)
        return round(seen.fresh), seen.unknown

    here, there = Jumps(clock, jumps_.MACHINE, clock.now), Jumps(other, jumps_.MACHINE, other.now)
    assert settle(here) == (0, True)
    with database.write() as session:
        session.execute(sa.update(ClockLevel).values(seen_at=clock.now() - timedelta(days=40)))
    assert settle(there) == (0, True)
    clock.jumps(3600.0)
    assert settle(here) == (3600, False)
    assert settle(Jumps(clock, jumps_.MACHINE, clock.now)) == (0, False)
