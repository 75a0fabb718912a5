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

from ratchet_contract.phases import EventType, JobPhase
from ratchet_service.db import clock as clocks
from ratchet_service.db import leases
from ratchet_service.db.clock import Clock
from ratchet_service.db.engine import Database
from ratchet_service.db.models import ClockLevel, Job
from ratchet_service.lifecycle.supervision import Timing
from ratchet_service.reconciler import clock_jumps as jumps_
from ratchet_service.reconciler import loop, supervise, ttl
from ratchet_service.reconciler.clock_jumps import Jumps
from ratchet_service.reconciler.loop import Reconciler
from ratchet_service.reconciler.ttl import Expiry
from tests.support.control_plane import Plane
from tests.support.server import wait_for

pytestmark = pytest.mark.takes_turns


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

    def boot_id(self) -> str:
        return self.machine

    def server_now(self, session: Session) -> datetime:
        lite = session.get_bind().dialect.name == "sqlite"
        return self.now() if lite else super().server_now(session) + timedelta(seconds=self.server_ahead)

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
def control_plane(
    tmp_path: Path, database: Database, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Plane]:
    monkeypatch.setattr(database, "clock", clock)
    monkeypatch.setattr(database, "_session_info", clocks.session_info(clock))
    made = Plane(tmp_path, database)
    made.serve_api()
    yield made
    made.close()


def looks(made: Reconciler) -> None:
    """Two rounds, of which the second began after now."""
    for _ in range(2):
        last = made.heartbeat.succeeded_at
        wait_for(lambda: made.heartbeat.succeeded_at != last, "another round", 30)  # noqa: B023


def gone(plane: Plane, job_id: str) -> bool:
    with plane.database.read() as session:
        return session.get(Job, job_id) is None


def jumps(plane: Plane, job_id: str) -> list[float]:
    return [event.data["seconds"] for event in plane.events(job_id) if event.type == "clock-jumped"]


@pytest.mark.parametrize("by", [7200.0, -7200.0])
def test_clock_jump_and_restart_do_not_end_a_job_with_a_timeout(
    control_plane: Plane, clock: SetClock, by: float
) -> None:
    first = control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 100_000, "every": 50}, policy={"timeout": "10m"})
    control_plane.wait_job(job_id, lambda job: job.step > 0, "training")
    clock.ahead = by
    wait_for(lambda: jumps(control_plane, job_id), "the jump to be told", 30)
    assert abs(jumps(control_plane, job_id)[0] - by) < 5
    first.stop()
    wait_for(lambda: control_plane.job(job_id).lease_token is None, "the first reconciler to end", 30)
    control_plane.start_reconciler()
    there = wait_for(lambda: control_plane.job(job_id).lease_token, "another to take it over", 30)
    step = control_plane.job(job_id).step
    control_plane.wait_job(job_id, lambda job: job.step > step + 50, "training on")
    job, (attempt,) = control_plane.job(job_id), control_plane.attempts(job_id)
    assert (job.phase, job.attempt, job.lease_token) == (JobPhase.RUNNING, 1, there) and attempt.ended_at is None
    control_plane.post(f"/v1/jobs/{job_id}/suspend")
    job = control_plane.wait(job_id, JobPhase.SUSPENDED)
    assert (job.failures, job.preemptions) == (0, 0) and 0 <= job.running_seconds < 600
    assert len(jumps(control_plane, job_id)) == 1


def test_clock_jump_does_not_shorten_the_grace_of_a_stop(control_plane: Plane, clock: SetClock) -> None:
    """The rank does not hear of it; once ``stop_grace`` is over it would be ended by force, as hanging."""
    made = control_plane.start_reconciler(timing=Timing(kill_after=60.0))
    job_id = control_plane.submit(
        {"steps": 100_000, "epochs": {"1": {"at": 3, "do": "deaf"}}}, policy={"stop_grace": "5m"}
    )
    control_plane.wait_job(job_id, lambda job: job.step > 3, "training")
    control_plane.post(f"/v1/jobs/{job_id}/suspend")
    control_plane.wait(job_id, JobPhase.STOPPING)
    looks(made)
    clock.ahead = 3600.0
    wait_for(lambda: jumps(control_plane, job_id), "the jump to be told", 30)
    looks(made)
    types = {event.type for event in control_plane.events(job_id)}
    assert not types & {"agent-stopped", "agent-killed"} and control_plane.job(job_id).phase is JobPhase.STOPPING


@pytest.mark.parametrize("by", [3600.0, -3600.0, -100.0])
def test_clock_jump_shifts_the_backoff_of_a_waiting_job(control_plane: Plane, clock: SetClock, by: float) -> None:
    job_id = control_plane.submit({"steps": 5})
    with control_plane.database.write() as session:
        until = clock.now() + timedelta(seconds=200)
        session.execute(sa.update(Job).where(Job.id == job_id).values(not_before=until))
    made = control_plane.start_reconciler()
    looks(made)
    clock.ahead = by
    wait_for(lambda: control_plane.job(job_id).not_before != until, "the jump to be seen", 30)
    moved = control_plane.job(job_id).not_before
    assert moved is not None
    assert abs((moved - until).total_seconds() - by) < 5
    looks(made)
    assert control_plane.job(job_id).phase is JobPhase.QUEUED


def test_backoff_that_has_ended_does_not_begin_again_when_the_clock_is_set_back(
    control_plane: Plane, clock: SetClock
) -> None:
    launcher = control_plane.start_reconciler()._attempt_launcher
    over(control_plane)
    job_id, long = control_plane.submit({"steps": 5}), control_plane.submit({"steps": 5})
    ends = clock.now() - timedelta(seconds=50)
    with control_plane.database.write() as session:
        for each, until in ((job_id, ends), (long, ends + timedelta(seconds=250))):
            session.execute(sa.update(Job).where(Job.id == each).values(not_before=until))
    clock.ahead = -100.0
    with control_plane.database.write() as session:
        launcher.shift_backoffs(session, -100.0)
    ended, waiting = control_plane.job(job_id).not_before, control_plane.job(long).not_before
    assert ended is not None and ended <= clock.now()
    assert waiting is not None and waiting == ends + timedelta(seconds=150)


def test_clock_jump_during_a_database_outage_is_applied_afterwards(
    control_plane: Plane, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a machine goes on that had stood still: its connections are broken."""
    monkeypatch.setattr(loop, "_ERROR_PAUSE", 0.01)
    job_id, until = control_plane.submit({"steps": 5}), clock.now() + timedelta(seconds=200)
    with control_plane.database.write() as session:
        session.execute(sa.update(Job).where(Job.id == job_id).values(not_before=until))
    made = control_plane.start_reconciler()
    looks(made)
    put_off, asked = made._attempt_launcher.shift_backoffs, list[float]()

    def away(session: Session, seconds: float) -> None:
        asked.append(seconds)
        if len(asked) < 3:
            raise OperationalError("UPDATE", {}, Exception("the connection is closed"))
        put_off(session, seconds)

    monkeypatch.setattr(made._attempt_launcher, "shift_backoffs", away)
    clock.ahead = 3600.0
    wait_for(lambda: made.heartbeat.jump_note, "the jump to be seen", 30)
    looks(made)
    job = control_plane.job(job_id)
    assert job.not_before is not None and abs((job.not_before - until).total_seconds() - 3600) < 5
    assert (job.phase, len(asked)) == (JobPhase.QUEUED, 3)


def test_timeout_counts_run_time_across_a_takeover_by_another_machine(control_plane: Plane, clock: SetClock) -> None:
    """Whose clock counts from another start, and nobody told it when the attempt began."""

    def kept() -> float:
        (attempt,) = control_plane.attempts(job_id)
        return float((attempt.deadlines or {}).get("run", {}).get("seconds", 0.0))

    first = control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 100_000, "every": 50}, policy={"timeout": "10m"})
    control_plane.wait_job(job_id, lambda job: job.step > 0, "training")
    looks(first)
    clock.passes(400.0)
    wait_for(lambda: kept() >= 400.0, "its count to be kept", 30)
    first.stop()
    wait_for(lambda: control_plane.job(job_id).lease_token is None, "the first reconciler to end", 30)
    clock.machine, clock.passed = "there", 0.0
    second = control_plane.start_reconciler()
    wait_for(lambda: control_plane.job(job_id).lease_token, "another to take it over", 30)
    looks(second)
    assert control_plane.job(job_id).phase is JobPhase.RUNNING
    clock.passes(250.0)
    assert control_plane.wait(job_id, JobPhase.FAILED).reason == "timeout"


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiry, "interval", 0.05)
    monkeypatch.setattr(loop, "IDLE_INTERVAL", 0.05)


def over(plane: Plane) -> None:
    """The newest reconciler ends, and has given back what it had."""
    made, thread = plane.reconcilers[-1]
    made.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_clock_jump_seen_by_two_reconcilers_shifts_backoff_once(control_plane: Plane, clock: SetClock) -> None:
    mine, foreign = control_plane.submit({"steps": 5}), control_plane.submit({"steps": 5})
    until = clock.now() + timedelta(seconds=200)
    with control_plane.database.write() as session:
        session.execute(sa.update(Job).values(not_before=until))
        job = session.get_one(Job, foreign)
        job.spec = {**job.spec, "launcher": {"kind": "slurm"}}
    made = [control_plane.start_reconciler() for _ in range(2)]
    for one in made:
        looks(one)
    clock.jumps(100.0)
    for one in made:
        wait_for(lambda: one.heartbeat.jump_note, "the jump to be seen", 30)  # noqa: B023
    over(control_plane)
    looks(control_plane.start_reconciler())  # which starts behind it
    moved = control_plane.job(mine).not_before
    assert moved is not None and abs((moved - until).total_seconds() - 100.0) < 5
    others = control_plane.job(
        foreign
    ).not_before  # on a server it may be another machine's, whose clock has not jumped
    assert others == (moved if control_plane.database.is_sqlite else until)


def test_clock_jump_without_a_running_reconciler_shifts_the_backoff(control_plane: Plane, clock: SetClock) -> None:
    job_id, until = control_plane.submit({"steps": 5}), clock.now() + timedelta(seconds=200)
    with control_plane.database.write() as session:
        session.execute(sa.update(Job).values(not_before=until))
    looks(control_plane.start_reconciler())
    over(control_plane)
    clock.jumps(3600.0)
    looks(control_plane.start_reconciler())
    moved = control_plane.job(job_id).not_before
    assert moved is not None and abs((moved - until).total_seconds() - 3600.0) < 5
    assert control_plane.job(job_id).phase is JobPhase.QUEUED


def test_clock_jump_is_recorded_for_all_running_jobs_in_one_transaction(
    control_plane: Plane, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the job that another reconciler has by then is left to it."""
    made = control_plane.start_reconciler()
    jobs = [control_plane.submit({"steps": 100_000, "every": 50}) for _ in range(3)]
    for job_id in jobs:
        control_plane.wait_job(job_id, lambda job: job.step > 0, "training")
    add, sessions = supervise.add_event, list[Session]()

    def added(session: Session, job_id: str, type_: str, *rest: Any, **more: Any) -> None:
        if type_ == EventType.CLOCK_JUMPED:
            sessions.append(session)
        add(session, job_id, type_, *rest, **more)

    monkeypatch.setattr(supervise, "add_event", added)
    with control_plane.database.write() as session:  # which the reconciler waits for
        clock.ahead = 3600.0
        job = session.get_one(Job, jobs[0], with_for_update=True)
        expires = leases.database_now(session) + timedelta(minutes=5)
        job.lease_token, job.lease_owner, job.lease_expires_at = "another's", "another", expires
    wait_for(lambda: jumps(control_plane, jobs[2]), "the jump to be told", 30)
    assert [len(jumps(control_plane, job_id)) for job_id in jobs] == [0, 1, 1]
    assert jobs[0] not in made._watches and len({id(session) for session in sessions}) == 1


@pytest.mark.parametrize("when", ["seen", "unseen", "restarted"])
def test_ttl_deletion_pauses_after_a_clock_jump(
    control_plane: Plane, clock: SetClock, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The pause also holds for a process that starts after the jump, if none ran when it came, or after a reboot: a clock that
    was set wrong may be set right by then."""
    quick(monkeypatch)
    looks(control_plane.start_reconciler())
    job_id = control_plane.submit({"steps": 5}, ttl="1h")
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    looks(control_plane.reconcilers[-1][0])
    if when == "seen":
        clock.jumps(7200.0)
        wait_for(lambda: control_plane.reconcilers[-1][0].heartbeat.jump_note, "the jump to be seen", 30)
        looks(control_plane.reconcilers[-1][0])
        assert control_plane.job(job_id).phase is JobPhase.SUCCEEDED
    over(control_plane)
    if when != "seen":
        clock.jumps(7200.0)
    if when == "restarted":
        clock.machine, clock.passed = "there", 1.0 - time.monotonic()  # a second after its start
    looks(control_plane.start_reconciler())
    assert control_plane.job(job_id).phase is JobPhase.SUCCEEDED
    over(control_plane)
    clock.passes(ttl.PAUSE_SECONDS - 10.0)
    looks(control_plane.start_reconciler())
    assert control_plane.job(job_id).phase is JobPhase.SUCCEEDED
    clock.passes(20.0)
    wait_for(lambda: gone(control_plane, job_id), "its ttl", 30)


@pytest.mark.parametrize("migrated_database", ["postgresql"], indirect=True)
def test_ttl_deletion_follows_the_database_clock_after_a_local_jump(
    control_plane: Plane, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    made = control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 5}, ttl="1h")
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    looks(made)
    clock.ahead = 7200.0
    wait_for(lambda: made.heartbeat.jump_note, "the jump to be seen", 30)
    clock.passes(ttl.PAUSE_SECONDS + 10.0)
    looks(made)
    assert control_plane.job(job_id).phase is JobPhase.SUCCEEDED
    clock.passes(3600.0)
    wait_for(lambda: gone(control_plane, job_id), "its ttl", 30)


def test_restart_without_a_clock_jump_deletes_at_the_ttl(
    control_plane: Plane, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    looks(control_plane.start_reconciler())
    job_id = control_plane.submit({"steps": 5}, ttl="1h")
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    over(control_plane)
    clock.passes(3700.0)
    control_plane.start_reconciler()
    wait_for(lambda: gone(control_plane, job_id), "its ttl", 30)


def test_clock_jump_is_detected_after_the_machines_row_expired(database: Database) -> None:
    clock, other = SetClock(), SetClock()
    other.machine = "there"

    def settle(process: Jumps) -> tuple[float, bool]:
        with database.write() as session:
            seen = process.handle(session)
        process.mark_handled(seen)
        return round(seen.jump_seconds), seen.first_observation

    here, there = Jumps(clock, jumps_.MACHINE, clock.now), Jumps(other, jumps_.MACHINE, other.now)
    assert settle(here) == (0, True)
    with database.write() as session:
        session.execute(sa.update(ClockLevel).values(seen_at=clock.now() - timedelta(days=40)))
    assert settle(there) == (0, True)
    clock.jumps(3600.0)
    assert settle(here) == (3600, False)
    assert settle(Jumps(clock, jumps_.MACHINE, clock.now)) == (0, False)
