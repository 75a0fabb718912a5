"""The rules of a schedule: of each move, of what a move has added to the histories, and of the state at the end.

Each check raises ``AssertionError``. Times are seconds of simulated time, which no wall clock changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause, Desired, Event, EventType, JobPhase
from ratchet_contract.protocol.timing import max_control_delay
from ratchet_service.db import leases
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, Checkpoint, Job
from ratchet_service.db.models import Event as Row
from ratchet_service.launchers.base import AttemptRef
from ratchet_service.lifecycle import goodput
from ratchet_service.lifecycle.decide import MAX_BACKOFF_AHEAD
from ratchet_service.lifecycle.supervision import Timing
from ratchet_service.reconciler.attempt_watch import Watch
from ratchet_service.scheduling import queue_queries
from tests.support import invariants
from tests.support.sim.agents import STEPS, Agent, State
from tests.support.sim.processes import SimDatabase

CPUS: Final = 3
LEASE: Final = 15.0
TIMEOUT: Final = 1800.0
"""``policy.timeout`` of all jobs."""
STOP_GRACE: Final = 5.0
"""``policy.stop_grace`` of all jobs."""
TIMING: Final = Timing(kill_after=3.0)
_NEW_EVENTS: Final = (
    sa.select(Row.id, Row.job_id, Row.attempt, Row.type, Row.data).where(Row.id > sa.bindparam("last")).order_by(Row.id)
)
Key = tuple[str, int]
"""A job and an attempt's number."""


def check_row_exists(database: Database, ref: AttemptRef) -> None:
    """An attempt is submitted only after its row is committed; a job may have been deleted since."""
    with database.read() as session:
        known = session.get(Job, ref.job_id) is None or session.get(Attempt, (ref.job_id, ref.attempt)) is not None
    assert known, f"{ref.name} is submitted, and has no row"


def check_backoff_is_over(database: Database, job_id: str) -> None:
    """A queued job for which a plan is requested is in no back-off."""
    with database.read() as session:
        job = session.get(Job, job_id)
        now = database.clock.now()
    if job is not None and job.phase is JobPhase.QUEUED and job.not_before is not None:
        assert not now < job.not_before <= now + MAX_BACKOFF_AHEAD, f"{job_id} is launched during its back-off"


class Checks:
    """The rules of one schedule, with what they remember of it."""

    def __init__(self, database: SimDatabase, agents: Sequence[Agent], ended: set[Key]) -> None:
        """``agents``: of all attempts, a list that grows. ``ended``: attempts that have ended; ``check_move`` adds them."""
        self._database, self._agents, self._ended, self._clock = database, agents, ended, database.time
        self._transactions = database.transactions
        self._launched_at: dict[Key, float] = {}
        self._stopped_at: dict[Key, float] = {}
        self._stop_requested_at: dict[str, float] = {}
        with database.read() as session:
            self._last_event = session.scalar(sa.select(sa.func.max(Row.id))) or 0

    def forget(self, job_id: str) -> None:
        """The job is deleted: the service knows nothing of its attempts any more, and no fence holds them back."""
        self._ended.difference_update({key for key in self._ended if key[0] == job_id})

    def check_move(self, watches: Iterable[tuple[str, Mapping[str, Watch]]]) -> None:
        """After each move. ``watches``: name and watches of each reconciler that lives."""
        if self._transactions != self._database.transactions:
            self._transactions = self._database.transactions
            with self._database.read() as session:
                for id_, job_id, attempt, type_, data in session.execute(_NEW_EVENTS, {"last": self._last_event}).all():
                    self._last_event = id_
                    self._check_event(session, job_id, attempt or 0, type_, data)
        self._check_agents()
        self._check_leases(watches)

    def _check_agents(self) -> None:
        """A job has one live attempt at most, and nothing of an ended attempt is alive."""
        live: dict[str, str] = {}
        for agent in self._agents:
            if agent.out_of_reach or not (agent.works or agent.state is State.RESULT):
                continue
            name, key = agent.ref.name, (agent.ref.job_id, agent.ref.attempt)
            assert key not in self._ended, f"{name} has ended, and is alive"
            if agent.works:
                other = live.setdefault(agent.ref.job_id, name)
                assert other == name, f"{agent.ref.job_id}: {other} and {name} are alive at one time"

    def _check_leases(self, watches: Iterable[tuple[str, Mapping[str, Watch]]]) -> None:
        """At most one reconciler acts for an attempt without asking the database for its lease."""
        since = self._clock.elapsed - LEASE * leases.SAFE_FRACTION
        trusted: dict[Key, str] = {}
        for name, held in watches:
            for watch in held.values():
                if watch.lease_held_at > since:
                    other = trusted.setdefault((watch.lease.job_id, watch.lease.attempt), name)
                    assert other == name, f"{watch.ref.name}: both {other} and {name} trust in its lease"

    def _check_event(self, session: Session, job_id: str, attempt: int, type_: str, data: dict[str, Any]) -> None:
        """What the last move has added to a history."""
        key, now = (job_id, attempt), self._clock.elapsed
        if type_ == Event.LAUNCH:
            self._launched_at.setdefault(key, now)
            faults = invariants.check_slots(session, CPUS)
            assert not faults, "; ".join(faults)
        elif type_ == EventType.ATTEMPT_ENDED:
            self._ended.add(key)
        elif type_ == EventType.AGENT_STOPPED:
            self._check_stop(key, data)
            self._stopped_at.setdefault(key, now)
        elif type_ == EventType.AGENT_KILLED and key in self._stopped_at:
            passed = now - self._stopped_at[key]
            assert passed >= TIMING.kill_after, f"{job_id}-a{attempt} is killed {passed:.0f} s after its SIGTERM"
        elif type_ == EventType.AGENT_KILLED:
            self._check_stop(key, data)
        elif type_ == Event.PREEMPT and "for" in data:
            victim = session.get(Job, job_id)
            if victim is not None:
                assert victim.priority < data["priority"], (
                    f"{job_id} is stopped for {data['for']} of no higher priority"
                )
        if data.get("desired") == Desired.RUN:
            self._stop_requested_at.pop(job_id, None)
        elif "desired" in data:
            self._stop_requested_at.setdefault(job_id, now)

    def _check_stop(self, key: Key, data: dict[str, Any]) -> None:
        """No attempt is stopped or killed before the time."""
        job_id, now, cause = key[0], self._clock.elapsed, data.get("cause")
        if cause == Cause.TIMEOUT:
            since, least = min(at for (job, _), at in self._launched_at.items() if job == job_id), TIMEOUT
        elif cause == Cause.LAUNCHER_ERROR:
            since, least = self._launched_at[key], TIMING.launch_deadline
        elif cause in (Cause.API_CANCEL, Cause.HANG):
            since, least = self._stop_requested_at.get(job_id, now), STOP_GRACE + max_control_delay(STOP_GRACE)
        else:
            return
        assert now - since >= least, f"{job_id}: {cause} after {now - since:.0f} s of {least:g} s"

    def check_end(self, home: HomePaths) -> None:
        """All jobs have come to rest: their histories, rows and files agree, and no slot is in use."""
        faults = invariants.check_database(self._database, CPUS)
        assert not faults, "; ".join(faults)
        with self._database.read() as session:
            for job in session.scalars(sa.select(Job).where(Job.phase == JobPhase.SUCCEEDED)):
                assert (job.step, job.committed_step) == (STEPS, STEPS), f"{job.id} succeeded at step {job.step}"
                row = session.get(Checkpoint, (job.id, STEPS, job.committed_attempt))
                assert row is not None and row.finished, f"{job.id} succeeded without its last checkpoint"
                assert home.job(job.id).checkpoint(STEPS, row.attempt).is_dir(), f"{row.name} is not on the disk"
            for one in session.scalars(sa.select(Attempt)):
                _check_goodput(one)
            assert not queue_queries.active_grants(session), "slots are in use, and every attempt has ended"


def _check_goodput(one: Attempt) -> None:
    """Each second of an ended attempt is in one part of its goodput."""
    assert one.ended_at is not None, f"{one.job_id}-a{one.number} has not ended"
    span = goodput.Span(one.created_at, one.ended_at, one.begun_at, one.training_at, steps_lost=one.steps_lost)
    lost = (one.ended_at - one.created_at).total_seconds() - goodput.parts_of(span).wall
    assert abs(lost) < 1e-6, f"{one.job_id}-a{one.number}: {lost:.0f} s are in no part of its goodput"
