"""The queue's part of a reconciler's round: rows are read, ``scheduler.schedule`` decides, and a transaction carries out what it
has decided, as ``launch`` and ``apply_schedule`` do.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Final

from ratchet_contract.phases import AttemptPhase, Cause, Desired, Event, JobPhase
from ratchet_service.db.leases import Lease, LeaseLost
from ratchet_service.lifecycle import decide
from ratchet_service.lifecycle.decision import Limits
from ratchet_service.reconciler import persisted_deadlines
from ratchet_service.reconciler.attempt_watch import Watch
from ratchet_service.scheduling import scheduler
from ratchet_service.scheduling.fair_order import Queued, Share
from ratchet_service.scheduling.preemption import Running
from ratchet_service.scheduling.scheduler import QueueState, Row
from ratchet_service.scheduling.slots import Capacity, Grant, Need
from tests.support.sim_in_memory.database import CPUS, Attempt

LIMITS: Final = Limits(max_failures=4, backoff=0.5, stop_grace=5.0, timeout=1800.0)
CAPACITY: Final = Capacity(cpus=CPUS)
MIN_RUN: Final = 60.0
_NEEDS: Final = {ranks: Need(0, ranks) for ranks in range(1, CPUS + 2)}
_SHARES: Final = {ranks: Share(0, ranks, 1) for ranks in range(1, CPUS + 2)}
_NO_SHARE: Final = Share()

Points = Generator[int, None, None]
"""Where a reconciler's process may be left standing: ``POINT``, ``CALL``, ``END``."""
POINT: Final = 0
CALL: Final = 1
"""Right before or after a call of the engine."""
END: Final = 2
"""Of a round."""


def next_number(job: Any) -> int:
    return int(job.attempt) + 1


class Launching:
    """``_begin`` and ``_submit`` are the reconciler's."""

    __slots__ = ()
    name: str
    w: Any
    watches: dict[str, Watch]

    def _begin(self, lease: Lease, held_at: float) -> Watch | None:
        raise NotImplementedError

    def _submit(self, watch: Watch, segments: Any) -> Points:
        raise NotImplementedError

    def _launch(self) -> Points:
        """What is to be done is decided first, and others commit before the transaction that decides again and does it. On
        PostgreSQL others commit between that transaction's reading and its writing, too, but nobody else launches."""
        w = self.w
        held_at = w.t
        found = scheduler.schedule(self._queue(), CAPACITY, "any", w.now)
        yield POINT
        if not found.has_changes:
            return
        if w.postgres:
            while w.launching not in (None, self):
                yield POINT
            w.launching = w.slots_lock(self)
        plan = scheduler.schedule(self._queue({*found.concerned}), CAPACITY, "any", w.now)
        if w.postgres:
            yield POINT
        planned = {start.row.key for start in found.starts}
        launched = []
        for start in plan.starts:
            job = self._unchanged(start.row) if start.row.key in planned else None
            if job is not None:
                launched.append(self._start(job, start.grant))
        for row, decision in plan.ends:
            job = self._unchanged(row)
            if job is not None:
                w.apply(job, decision.event, reason=decision.reason, message=decision.message)
        for wait in plan.waits:
            job = self._unchanged(wait.row) if wait.victims else None
            if job is not None:
                self._make_room(job, wait.victims)
        w.launching = None
        yield POINT
        for lease, segments in launched:
            watch = self._begin(lease, held_at)
            if watch is None:
                continue
            try:
                yield from self._submit(watch, segments)
            except LeaseLost:
                self.watches.pop(lease.job_id, None)

    def _unchanged(self, row: Row) -> Any:
        """As ``apply_schedule.locked_job``."""
        job = self.w.jobs.get(row.queued.job)
        return job if job is not None and job.phase is JobPhase.QUEUED and job.version == row.version else None

    def _alive(self) -> Iterator[tuple[Any, Any]]:
        w = self.w
        for job in w.jobs.values():
            attempt = w.attempts[job.id][-1] if job.phase.active else None
            if attempt is not None and attempt.phase is not AttemptPhase.ENDED:
                yield job, attempt

    def _queue(self, only: set[str] | None = None) -> QueueState:
        w = self.w
        rows = [
            Row(
                Queued(job.id, job.owner, job.priority, job.created_at, _SHARES[job.ranks], job.preempting_since),
                "", None, None, job.attempt, job.version, _NEEDS[job.ranks], LIMITS.timeout, job.running_seconds,
            )
            for job in w.jobs.values()
            if is_due(job, w.now) and (only is None or job.id in only)
        ]  # fmt: skip
        alive = list(self._alive())
        held: dict[str, Share] = {}
        for job, _ in alive:
            held[job.owner] = held.get(job.owner, _NO_SHARE).plus(_SHARES[job.ranks])
        grants = [Grant((), attempt.cpus, job.id) for job, attempt in alive]
        return QueueState(rows, {"": True}, grants, [self._running(*one) for one in alive], held, w.limit)

    def _running(self, job: Any, attempt: Any) -> Running:
        w = self.w
        before = w.attempts[job.id][-2].cause if len(w.attempts[job.id]) > 1 else None
        young = attempt.training_at is None or (w.now - attempt.training_at).total_seconds() < MIN_RUN
        return Running(
            job.id,
            attempt.number,
            job.owner,
            job.priority,
            Need(0, len(attempt.cpus)),
            stopping=job.desired is not Desired.RUN
            or attempt.phase is AttemptPhase.STOPPING
            or attempt.result is not None,
            is_protected=before is Cause.HIGHER_PRIORITY and young,
            unsaved_seconds=float(max(0, job.step - job.committed_step)),
            started_at=attempt.created_at,
        )

    def _make_room(self, job: Any, victims: Any) -> None:
        w = self.w
        rows = [(w.jobs.get(one.job), one) for one in victims]
        if not rows or not all(row is not None and is_stoppable(row, one, job.priority) for row, one in rows):
            return
        for row, one in rows:
            assert row.priority < job.priority, f"{row.id} is stopped for {job.id}, whose priority is no higher"
            w.trace and w.trace_line(f"{row.id} is stopped for {job.id}")
            w.apply(row, Event.PREEMPT, expected_attempt=one.attempt, cause=Cause.HIGHER_PRIORITY)
        job.preempting_since = w.now

    def _start(self, job: Any, grant: Grant) -> tuple[Lease, Any]:
        w = self.w
        waits = job.not_before is not None and w.now < job.not_before <= w.now + decide.MAX_BACKOFF_AHEAD
        assert not waits, f"{job.id} is launched within its back-off"
        number, segments = next_number(job), w.lineage(job)
        assert w.attempt(job.id, number) is None, f"{job.id}: attempt {number} is there already"
        w.attempts[job.id].append(
            Attempt(job.id, number, grant.cpus, segments, w.now, w.t, persisted_deadlines.initial_deadlines(w))
        )
        for slot in grant.cpus:
            assert w.lent[slot] is None, f"CPU slot {slot} is lent to {w.lent[slot]} and {job.id}"
            w.lent[slot] = (job.id, number)
        values = {"attempt": number, "not_before": None, "checkpoint_request": 0, **w.new_lease(self.name)}
        if job.started_at is None:
            values["started_at"] = w.now
        w.apply(job, Event.LAUNCH, values=values, data={"attempt": number})
        w.trace and w.trace_line(f"{self.name} launches attempt {number} of {job.id}")
        return Lease(job.id, number, job.lease_token), segments


def is_due(job: Any, now: Any) -> bool:
    """As ``queue_queries.is_due``."""
    return job.phase is JobPhase.QUEUED and (
        job.not_before is None or not now < job.not_before <= now + decide.MAX_BACKOFF_AHEAD
    )


def is_stoppable(row: Any, one: Running, priority: int) -> bool:
    """As ``apply_schedule._still_stoppable``."""
    return (
        row.attempt == one.attempt
        and row.phase in (JobPhase.STARTING, JobPhase.RUNNING)
        and row.desired is Desired.RUN
        and row.priority < priority
    )
