"""The model's database: rows as slotted objects in dicts. What a transaction writes it writes within one move, under its guard.

The rows carry the names of the real columns, so that the service's own functions take them. ``apply`` and ``act`` write what
``transitions.moved`` and ``job_actions._is_already_applied`` say; ``free_jobs``, ``take``, ``renew`` and ``hold`` keep the guards
of ``leases``; ``ingest`` those of its namesake. No row is held over two moves, since nobody holds one while waiting for
something.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final

from ratchet_contract.checkpoint.resume_report import Base, Segment, lineage_contains
from ratchet_contract.errors import NotFound
from ratchet_contract.phases import AttemptPhase, Cause, Desired, Event, JobPhase
from ratchet_contract.protocol.lineage import lineage
from ratchet_contract.protocol.messages import ForkSource
from ratchet_service.agent_reports import deduplicate, fencing, ingest
from ratchet_service.db import leases, transitions
from ratchet_service.db.leases import Free, Lease, LeaseLost
from ratchet_service.reconciler.loop import IDLE_INTERVAL
from ratchet_service.usecases import job_actions
from tests.support.sim.processes import START

CPUS: Final = 3
LEASE: Final = 15.0
STEPS: Final = 4
ENDS: Final = (Event.END_SUCCEEDED, Event.END_SUSPENDED, Event.END_CANCELLED, Event.END_REQUEUE, Event.END_FAILED)
_LIVE: Final = (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING)


class Job:
    __slots__ = (
        "attempt",
        "attempts_without_progress",
        "checkpoint_request",
        "committed_attempt",
        "committed_step",
        "created_at",
        "desired",
        "desired_at",
        "desired_cause",
        "ended_at",
        "failures",
        "fork_source",
        "id",
        "lease_expires_at",
        "lease_owner",
        "lease_token",
        "message",
        "not_before",
        "owner",
        "paused_at",
        "paused_seconds",
        "phase",
        "preempting_since",
        "preemptions",
        "priority",
        "ranks",
        "reason",
        "resume_from",
        "retries",
        "running_seconds",
        "started_at",
        "step",
        "updated_at",
        "version",
        "wished",
    )  # fmt: skip

    def __init__(self, job_id: str, owner: str, priority: int, ranks: int, now: datetime) -> None:
        self.id, self.owner, self.priority, self.ranks = job_id, owner, priority, ranks
        self.created_at = self.updated_at = now
        self.phase, self.desired = JobPhase.QUEUED, Desired.RUN
        self.attempt = self.version = self.preemptions = self.failures = self.attempts_without_progress = (
            self.retries
        ) = 0
        self.step = self.committed_step = self.checkpoint_request = 0
        self.running_seconds = self.paused_seconds = 0.0
        self.desired_cause = self.desired_at = self.not_before = self.lease_owner = self.lease_token = None
        self.lease_expires_at = self.reason = self.message = self.preempting_since = self.paused_at = self.ended_at = (
            None
        )
        self.wished: float | None = None  # when the wish was made, by the clock that nobody sets
        self.started_at = self.resume_from = self.committed_attempt = self.fork_source = None


class Attempt:
    """With its one node's columns: ``cpus``, ``acked``."""

    __slots__ = (
        "acked",
        "at",
        "base_attempt",
        "base_digest",
        "base_step",
        "begun_at",
        "cause",
        "committed_step",
        "cpus",
        "created_at",
        "deadlines",
        "ended_at",
        "job_id",
        "last_step",
        "launch",
        "lineage",
        "number",
        "outcome",
        "phase",
        "result",
        "resume_report",
        "steps_lost",
        "training_at",
    )  # fmt: skip

    def __init__(
        self,
        job_id: str,
        number: int,
        cpus: tuple[int, ...],
        segments: list[Segment],
        now: datetime,
        at: float,
        clocks: dict[str, Any],
    ) -> None:
        self.at, self.deadlines = at, clocks  # by the clock that nobody sets
        self.job_id, self.number, self.cpus, self.lineage, self.created_at = job_id, number, cpus, segments, now
        self.phase, self.launch, self.acked, self.last_step, self.steps_lost = (
            AttemptPhase.LAUNCHING,
            _NO_LAUNCH,
            0,
            0,
            0,
        )
        self.base_step = self.base_attempt = self.base_digest = self.begun_at = self.training_at = self.ended_at = None
        self.cause = self.outcome = self.result = self.resume_report = self.committed_step = None


_NO_LAUNCH: Final[dict[str, Any]] = {}


class Checkpoint:
    __slots__ = ("attempt", "finished", "step")

    def __init__(self, step: int, attempt: int, finished: bool) -> None:
        self.step, self.attempt, self.finished = step, attempt, finished


class Told:
    """A row of the events' table."""

    __slots__ = ("at", "attempt", "data", "message", "type")

    def __init__(self, at: datetime, type_: str, attempt: int | None, data: dict[str, Any], message: str) -> None:
        self.at, self.type, self.attempt, self.data, self.message = at, type_, attempt, data, message


class Report:
    """An agent's; ``messages`` are (kind, ...), numbered from ``from_seq``."""

    __slots__ = ("attempt", "from_seq", "job_id", "last_step", "messages", "phase", "result")

    def __init__(
        self,
        job_id: str,
        attempt: int,
        phase: AttemptPhase,
        last_step: int,
        from_seq: int,
        messages: list[Any],
        result: Any,
    ) -> None:
        self.job_id, self.attempt, self.phase, self.last_step = job_id, attempt, phase, last_step
        self.from_seq, self.messages, self.result = from_seq, messages, result


class Rows:
    """``broken`` is raised as ``AssertionError`` where a commit breaks a rule by itself."""

    def __init__(self) -> None:
        self.t = self.set_by = 0.0
        """Seconds that have passed; and by which somebody has set the wall clocks. Nobody sets the server's."""
        self.now = self.served = START
        self.jobs: dict[str, Any] = {}
        self.attempts: dict[str, list[Any]] = {}
        self.checkpoints: dict[str, list[Any]] = {}
        self.events: dict[str, list[Any]] = {}
        self.lent: list[tuple[str, int] | None] = [None] * CPUS
        self._tokens = 0

    def advance_time(self, seconds: float) -> None:
        self.t += seconds
        self.served = START + timedelta(seconds=self.t)
        self.now = self.served + timedelta(seconds=self.set_by) if self.set_by else self.served

    # --- transitions ---------------------------------------------------------------------------------------------------

    def add(self, job: Any, type_: str, attempt: int | None, data: dict[str, Any], message: str = "") -> None:
        self.events[job.id].append(Told(self.now, type_, attempt, data, message))

    def apply(
        self,
        job: Any,
        event: Event,
        *,
        expected_attempt: int | None = None,
        cause: Cause | None = None,
        reason: str | None = None,
        message: str | None = None,
        data: dict[str, Any] | None = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        changes = transitions.transition_values(job, event, self.now, expected_attempt=expected_attempt, cause=cause)
        if values:
            changes |= values
        if event is not Event.CHECKPOINT:
            job.reason, job.message = reason, message
        before, wanted = job.phase, job.desired
        for name, value in changes.items():
            setattr(job, name, value)
        job.version += 1
        if wanted is not job.desired:
            job.wished = None if job.desired is Desired.RUN else self.t if job.wished is None else job.wished
        facts = {"from": before._value_, "to": job.phase._value_, "desired": job.desired._value_}
        if data:
            facts |= data
        self.add(job, event._value_, job.attempt or None, facts)
        if event in ENDS and before in _LIVE:
            _right_end(job, event, wanted)

    def act(self, job: Any, event: Event) -> None:
        if not job_actions._is_already_applied(job, event):
            self.apply(job, event)

    # --- leases --------------------------------------------------------------------------------------------------------

    def new_lease(self, owner: str) -> dict[str, Any]:
        self._tokens += 1
        expires = self.served + timedelta(seconds=LEASE)
        return {"lease_owner": owner, "lease_token": f"token {self._tokens}", "lease_expires_at": expires}

    def free_jobs(self, skip: Collection[str], dead: Collection[str]) -> list[Free]:
        return [
            Free(job.id, job.attempt, job.lease_token, job.lease_expires_at)
            for job in self.jobs.values()
            if job.phase in _LIVE
            and job.id not in skip
            and (leases.is_expired(job.lease_token, job.lease_expires_at, self.served) or job.lease_owner in dead)
        ]

    def take(self, free: Free, owner: str) -> Lease | None:
        job = self.jobs.get(free.job_id)
        if job is None or job.phase not in _LIVE:
            return None
        if (job.attempt, job.lease_token, job.lease_expires_at) != free[1:]:
            return None
        for name, value in self.new_lease(owner).items():
            setattr(job, name, value)
        return Lease(job.id, job.attempt, job.lease_token)

    def renew(self, held: Iterable[Lease]) -> set[str]:
        expires, out = self.served + timedelta(seconds=LEASE), set()
        for lease in held:
            job = self.jobs.get(lease.job_id)
            if job is not None and job.lease_token == lease.token:
                job.lease_expires_at = expires
                out.add(job.id)
        return out

    def hold(self, lease: Lease) -> Any:
        job = self.jobs.get(lease.job_id)
        if job is None or not leases.has_lease(job, lease):
            raise LeaseLost(f"{lease.job_id}: another reconciler has taken it over")
        return job

    def attempt(self, job_id: str, number: int) -> Any:
        for one in reversed(self.attempts.get(job_id, ())):
            if one.number == number:
                return one
        return None

    def runs(self, agent: Any) -> bool:
        """Its attempt has not ended."""
        row = self.attempt(agent.job_id, agent.attempt)
        return row is not None and row.phase is not AttemptPhase.ENDED

    def until_next(self) -> float:
        """As ``Reconciler._seconds_to_next_backoff_end``."""
        due = [
            job.not_before for job in self.jobs.values() if job.phase is JobPhase.QUEUED and job.not_before is not None
        ]
        later = [at for at in due if at > self.now]
        return min(IDLE_INTERVAL, (min(later) - self.now).total_seconds()) if later else IDLE_INTERVAL

    # --- lineage -------------------------------------------------------------------------------------------------------

    def lineage(self, job: Any, attempt: int | None = None, base: Base | None = None) -> list[Segment]:
        """Before a launch (``attempt`` None), or as it ends in attempt ``attempt``, as ``ending._lineage`` has it."""
        bases = {
            one.number: make_base(one.base_step, one.base_attempt)
            for one in self.attempts[job.id]
            if one.base_step is not None
        }
        if base is not None and attempt is not None:
            bases.setdefault(attempt, base)
        wish = None
        if job.resume_from is not None and attempt not in bases:
            wish = make_base(job.resume_from["step"], job.resume_from["attempt"])
        fork: ForkSource | None = None
        return lineage(bases, resume_from=wish, fork=fork)

    def committed(self, job: Any, segments: list[Segment]) -> Iterator[Any]:
        """Newest first."""
        rows = sorted(self.checkpoints[job.id], key=_place, reverse=True)
        return (row for row in rows if lineage_contains(segments, row.step, row.attempt))

    # --- reports -------------------------------------------------------------------------------------------------------

    def known(self, job_id: str) -> bool:
        return job_id in self.jobs

    def admit(self, report: Report, *, held: bool = False) -> tuple[Any, Any]:
        """Is it listened to? Before anything is written (``held``: it stands there for a while), and again with the job's row
        held. Raises ``NotFound``, ``Stale``."""
        job, attempt = self.jobs.get(report.job_id), self.attempt(report.job_id, report.attempt)
        if job is None or attempt is None:
            raise NotFound("no such attempt", code="attempt-not-found")
        fencing.raise_if_stale(job, attempt)
        return job, attempt

    def ingest(self, report: Report) -> tuple[int, Desired, Cause | None]:
        """The second half of a report. Returns what is acknowledged and wanted; one without news only reads."""
        job, attempt = self.admit(report)
        fresh = (
            bool(report.messages) and report.from_seq + len(report.messages) - 1 > attempt.acked
        )  # as ``ingest_news.has_news``
        later = deduplicate.is_later_phase(report.phase, attempt.phase)
        if not (fresh or later or (report.result is not None and attempt.result is None)):
            return attempt.acked, job.desired, job.desired_cause
        if later:
            attempt.phase = report.phase
        attempt.last_step = max(attempt.last_step, report.last_step)
        self.store(job, attempt, report)
        if report.result is not None and attempt.result is None:
            attempt.result = report.result
            self.add(job, "result", attempt.number, {"cause": report.result.cause.value})
        return attempt.acked, job.desired, job.desired_cause

    def store(self, job: Any, attempt: Any, report: Any) -> None:
        fresh: list[Any] = ingest.unstored_messages(report, attempt.acked)
        for message in fresh:
            self._apply_message(job, attempt, message)
        attempt.acked += len(fresh)

    def _apply_message(self, job: Any, attempt: Any, message: tuple[Any, ...]) -> None:
        """As ``ingest_effects``."""
        kind, newest = message[0], attempt.number == job.attempt
        if kind == "started":
            self.add(job, "rank-started", attempt.number, {"rank": 0})
        elif kind == "training":
            _, step, writer, began = message
            attempt.base_step, attempt.base_attempt, attempt.training_at = step, writer, began
            attempt.last_step = max(attempt.last_step, step)
            if newest and job.phase.active:
                job.step = job.committed_step = step
                job.committed_attempt, job.resume_from = writer, None
                data = {"base_step": step, "base_attempt": writer}
                self.apply(
                    job,
                    Event.TRAINING,
                    expected_attempt=attempt.number,
                    data=data,
                    reason=job.reason,
                    message=job.message,
                )
        elif kind == "progress":
            attempt.last_step = max(attempt.last_step, message[1])
            if newest:
                job.step = message[1]
        else:
            _, step, writer, finished = message
            row = next((r for r in self.checkpoints[job.id] if (r.step, r.attempt) == (step, writer)), None)
            if row is None:
                self.checkpoints[job.id].append(Checkpoint(step, writer, finished))
            attempt.committed_step = max(attempt.committed_step or 0, step)
            attempt.last_step = max(attempt.last_step, step)
            if newest and step >= job.committed_step:
                job.committed_step, job.committed_attempt = step, writer
            assert row is None, f"{job.id}: the commit of step {step} by attempt {writer} is stored for the second time"
            self.add(job, "checkpoint", attempt.number, {"checkpoint": f"step-{step:012d}.a{writer:04d}"})


@cache
def make_base(step: int, attempt: int | None) -> Base:
    return Base(step=step, attempt=attempt)


def _place(row: Any) -> tuple[int, int]:
    return row.step, row.attempt


def _right_end(job: Any, event: Event, wanted: Desired) -> None:
    """What somebody wanted is where an end leads, unless the job was done, or cannot go on."""
    if wanted is Desired.CANCEL:
        assert event in (Event.END_CANCELLED, Event.END_SUCCEEDED), (
            f"{job.id}: a cancel was wanted, and came to {event}"
        )
    if wanted is Desired.SUSPEND:
        assert event is not Event.END_REQUEUE, f"{job.id}: a suspend was wanted, and it is queued again"
