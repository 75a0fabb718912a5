"""The wall clock is set while jobs run: no healthy job is ended for it, and none loses an attempt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import JobPhase
from ratchet_service.db import clock as clocks
from ratchet_service.db.clock import Clock
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job
from ratchet_service.lifecycle.supervision import Timing
from ratchet_service.reconciler import ttl
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


@pytest.mark.parametrize("by", [7200.0, -7200.0])
def test_clock_jump_and_restart_do_not_end_a_job_with_a_timeout(
    control_plane: Plane, clock: SetClock, by: float
) -> None:
    first = control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 100_000, "every": 50}, policy={"timeout": "10m"})
    control_plane.wait_job(job_id, lambda job: job.step > 0, "training")
    clock.ahead = by
    looks(first)
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
    looks(made)
    types = {event.type for event in control_plane.events(job_id)}
    assert not types & {"agent-stopped", "agent-killed"} and control_plane.job(job_id).phase is JobPhase.STOPPING


@pytest.mark.parametrize("by", [3600.0, -3600.0, -300.0])
def test_backoff_lasts_at_most_ten_minutes_after_a_clock_jump(control_plane: Plane, clock: SetClock, by: float) -> None:
    job_id = control_plane.submit({"steps": 5})
    with control_plane.database.write() as session:
        until = clock.now() + timedelta(seconds=200)
        session.execute(sa.update(Job).where(Job.id == job_id).values(not_before=until))
    made = control_plane.start_reconciler()
    looks(made)
    assert control_plane.job(job_id).phase is JobPhase.QUEUED
    clock.ahead = by
    if by == -300.0:
        looks(made)
        assert control_plane.job(job_id).phase is JobPhase.QUEUED
        clock.passes(500.0)
    control_plane.wait(job_id, JobPhase.SUCCEEDED)


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


def ended_job(plane: Plane) -> str:
    """Return a job that has succeeded, with a ttl of an hour; no reconciler runs."""
    made = plane.start_reconciler()
    job_id = plane.submit({"steps": 5}, ttl="1h")
    plane.wait(job_id, JobPhase.SUCCEEDED)
    made.stop()
    plane.reconcilers[-1][1].join(30)
    return job_id


def assert_deleted_ten_minutes_after_the_ttl(plane: Plane, clock: SetClock, expiry: Expiry, job_id: str) -> None:
    """The job is still there, and goes only ten minutes after its ttl was seen to have passed."""
    assert not gone(plane, job_id)
    clock.passes(3600.0)
    expiry.run()
    assert not gone(plane, job_id)
    clock.passes(ttl.CONFIRM_SECONDS)
    expiry.run()
    assert gone(plane, job_id)


@pytest.mark.parametrize("when", ["seen", "restarted"])
def test_wrong_clock_that_is_corrected_within_ten_minutes_deletes_no_job(
    control_plane: Plane, clock: SetClock, when: str
) -> None:
    """Also in a service that starts while the clock is wrong, and after events with the wrong time."""
    job_id = ended_job(control_plane)
    expiry = Expiry(control_plane.database, control_plane.settings.paths)
    clock.jumps(7200.0)
    expiry.run()
    control_plane.submit({"steps": 5})
    if when == "restarted":
        expiry = Expiry(control_plane.database, control_plane.settings.paths)
        expiry.run()
    clock.passes(ttl.CONFIRM_SECONDS - 10.0)
    expiry.run()
    clock.jumps(-7200.0)
    expiry.run()
    clock.passes(20.0)
    expiry.run()
    assert_deleted_ten_minutes_after_the_ttl(control_plane, clock, expiry, job_id)


@pytest.mark.parametrize("migrated_database", ["postgresql"], indirect=True)
def test_ttl_deletion_follows_the_database_clock_after_a_local_jump(control_plane: Plane, clock: SetClock) -> None:
    job_id = ended_job(control_plane)
    expiry = Expiry(control_plane.database, control_plane.settings.paths)
    clock.ahead = 7200.0
    expiry.run()
    clock.passes(ttl.CONFIRM_SECONDS)
    expiry.run()
    assert_deleted_ten_minutes_after_the_ttl(control_plane, clock, expiry, job_id)
