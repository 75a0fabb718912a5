"""The queue's part of a reconciler's round, as ``launching`` and ``queueing`` have it: who holds what, whose turn it is, who
makes room, and the transaction that starts attempts.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from ratchet_contract.phases import AttemptPhase, Cause, Desired, Event, JobPhase
from ratchet_service.db.leases import Lease, LeaseLost
from ratchet_service.lifecycle import decide
from ratchet_service.lifecycle.decision import Action, Limits, view_of
from ratchet_service.reconciler import persisted_deadlines
from ratchet_service.reconciler.attempt_watch import Watch
from ratchet_service.scheduling import fair_order, preemption, slots
from ratchet_service.scheduling.fair_order import Queued, Share
from ratchet_service.scheduling.preemption import Running
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
        """What is to be done is found first, and others commit before the transaction that does it. On PostgreSQL others commit
        between that transaction's reading and its writing, too, but nobody else launches."""
        w = self.w
        held_at = w.t
        foreseen = self._plan()
        yield POINT
        if not foreseen:
            return
        if w.postgres:
            while w.launching not in (None, self):
                yield POINT
            w.launching = w.slots_lock(self)
            seen = self._queue(foreseen)
            yield POINT
            launched = self._turns(*seen)
            w.launching = None
        else:
            launched = self._turns(*self._queue(foreseen))
        yield POINT
        for lease, segments in launched:
            watch = self._begin(lease, held_at)
            if watch is None:
                continue
            try:
                yield from self._submit(watch, segments)
            except LeaseLost:
                self.watches.pop(lease.job_id, None)

    def _plan(self) -> set[str]:
        """As ``foreseen``: all that come before the last one whom something concerns. Nobody is told why it waits here."""
        w = self.w
        board, room, places = self._queue()
        passed: list[str] = []
        upto = 0
        for place in places:
            job = w.jobs[place.queued.job]
            passed.append(job.id)
            if place.held_back_reason is not None or (board.exhausted and not room.can_help(place.queued.priority)):
                continue
            decision = decide.decide(view_of(job, LIMITS), w.now)
            if decision.action is Action.END:
                upto = len(passed)
            elif decision.action is Action.LAUNCH:
                need = _NEEDS[job.ranks]
                answer = board.allocate(job.id, need)
                if isinstance(answer, Grant) or (
                    answer.shortfall is not None
                    and room.choose_victims(job.owner, job.priority, need, answer.shortfall)
                ):
                    upto = len(passed)
        return set(passed[:upto])

    def _queue(self, foreseen: set[str] | None = None) -> tuple[Any, Any, list[Any]]:
        """Who holds what, who could make room, and whose turn it is; of ``foreseen``, or of all."""
        w = self.w
        grants, running = [], []
        held: dict[str, Share] = {}
        for job in w.jobs.values():
            attempt = w.attempts[job.id][-1] if job.phase.active else None
            if attempt is None or attempt.phase is AttemptPhase.ENDED:
                continue
            grants.append(Grant((), attempt.cpus, job.id))
            held[job.owner] = held.get(job.owner, _NO_SHARE).plus(_SHARES[job.ranks])
            running.append(self._running(job, attempt))
        queue = [
            Queued(job.id, job.owner, job.priority, job.created_at, _SHARES[job.ranks], job.preempting_since)
            for job in w.jobs.values()
            if is_due(job, w.now) and (foreseen is None or job.id in foreseen)
        ]
        places = fair_order.order_queue(queue, held, w.limit)
        return slots.Board(CAPACITY, grants), preemption.PreemptionPlanner(running, "any"), places

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

    def _turns(self, board: Any, room: Any, places: list[Any]) -> list[tuple[Lease, Any]]:
        w = self.w
        out = []
        for place in places:
            queued = place.queued
            job = w.jobs.get(queued.job)
            if place.held_back_reason is not None or (board.exhausted and not room.can_help(queued.priority)):
                continue
            if job is None or job.phase is not JobPhase.QUEUED:
                continue
            decision = decide.decide(view_of(job, LIMITS), w.now)
            if decision.action is Action.END:
                w.apply(job, decision.event, reason=decision.reason, message=decision.message)
            elif decision.action is Action.LAUNCH:
                need = _NEEDS[job.ranks]
                answer = board.allocate(job.id, need)
                if isinstance(answer, Grant):
                    out.append(self._start(job, answer))
                elif answer.shortfall is not None:
                    self._make_room(job, room.choose_victims(job.owner, job.priority, need, answer.shortfall))
        return out

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
    """As ``queue_rows.due``."""
    return job.phase is JobPhase.QUEUED and (
        job.not_before is None or not now < job.not_before <= now + decide.MAX_BACKOFF_AHEAD
    )


def is_stoppable(row: Any, one: Running, priority: int) -> bool:
    """As ``queueing.Round._still_stoppable``."""
    return (
        row.attempt == one.attempt
        and row.phase in (JobPhase.STARTING, JobPhase.RUNNING)
        and row.desired is Desired.RUN
        and row.priority < priority
    )
