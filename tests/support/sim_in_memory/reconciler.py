"""A reconciler's process as a generator: it yields between every two deeds, where it may be left standing, or end.

The service's pure functions decide what it does next (``scheduler.schedule``, ``supervision``, ``attempt_result``, ``decide``);
the order of reads, writes and calls of the engine is that of ``loop``, ``launch``, ``supervise`` and ``finish_attempt``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ratchet_contract.checkpoint.resume_report import lineage_contains
from ratchet_contract.phases import AttemptPhase, Cause, EventType
from ratchet_service.db import leases
from ratchet_service.db.leases import Lease, LeaseLost
from ratchet_service.lifecycle import attempt_result, monotonic_deadlines, supervision
from ratchet_service.lifecycle.decision import view_of
from ratchet_service.lifecycle.supervision import ActionKind, DesiredState, Supervised, Supervision, Timing
from ratchet_service.reconciler import persisted_deadlines
from ratchet_service.reconciler.attempt_watch import Watch, restore_action
from ratchet_service.reconciler.loop import next_poll_at
from ratchet_service.reconciler.ttl import INTERVAL
from tests.support.sim_in_memory import launching
from tests.support.sim_in_memory.database import LEASE, Checkpoint
from tests.support.sim_in_memory.launching import CALL, END, LIMITS, POINT, Points

TIMING: Final = Timing(kill_after=3.0)
_NOBODY: Final[frozenset[str]] = frozenset()


class Reconciler(launching.Launching):
    __slots__ = ("look_at", "looks_at", "name", "points", "renewed", "swept", "swept_at", "w", "watches", "woken")

    def __init__(self, world: Any, name: str) -> None:
        self.w, self.name = world, name
        self.watches: dict[str, Watch] = {}
        self.look_at = self.renewed = self.looks_at = 0.0
        self.swept_at = 0.0
        self.woken = self.swept = False
        self.points = self._rounds()

    def _rounds(self) -> Points:
        while True:
            w, t = self.w, self.w.t
            if self.watches and t - self.renewed >= LEASE / 4:
                yield POINT
                for job_id in w.renew([watch.lease for watch in self.watches.values()]):
                    self.watches[job_id].lease_held_at = t
                    self._keep(self.watches[job_id])
                self.renewed = t
                w.check_lease_exclusive(self)
                yield POINT
            if not self.swept:
                self.swept = True
                w.engine.sweep(w.runs)
                yield POINT
            woken, self.woken = self.woken, False
            if woken or t >= self.look_at:
                yield from self._take_over()
                for job in w.jobs.values():
                    if launching.is_due(job, w.now):
                        yield from self._launch()
                        break
                self.look_at = t + w.until_next()
            if self.watches and t >= self.looks_at:
                began = w.t
                yield from self._poll_all()
                self.looks_at = next_poll_at(began, w.t)
            if t - self.swept_at >= INTERVAL:
                self.swept_at = t
                w.engine.sweep(w.runs)
                yield POINT
            yield END

    def _take_over(self) -> Points:
        w = self.w
        if len(self.watches) == len(w.jobs):
            return
        for found in w.free_jobs(self.watches, w.dead if w.same_host else _NOBODY):
            held_at = w.t
            yield POINT
            lease = w.take(found, self.name)
            if lease is None:
                continue
            w.trace and w.trace_line(f"{self.name} takes {lease.job_id} over")
            self._begin(lease, held_at)
            yield POINT

    def _begin(self, lease: Lease, held_at: float) -> Watch | None:
        w = self.w
        job, attempt = w.jobs.get(lease.job_id), w.attempt(lease.job_id, lease.attempt)
        if job is None or attempt is None:
            return None
        ref: Any = (lease.job_id, lease.attempt)
        ran = monotonic_deadlines.counted_seconds(attempt.deadlines.get(persisted_deadlines.RUN), attempt.begun_at, w)
        since = None if ran is None else w.t - ran
        known = Supervision(w.t, w.t, w.t, since)
        for event in w.events[job.id]:
            if event.attempt == lease.attempt and event.type in (EventType.AGENT_STOPPED, EventType.AGENT_KILLED):
                known = restore_action(known, event, w.t)
        known = persisted_deadlines.restore(
            known, attempt.deadlines, w,
            has_slots=w.engine.slots, max_gap=LEASE / 4, launch_deadline=TIMING.launch_deadline,
        )  # fmt: skip
        made = Watch(lease, ref, w.engine, 1, Supervised(view_of(job, LIMITS)), known, held_at)
        made.stored_deadlines = persisted_deadlines.running_deadlines(known, is_queued=False)
        self.watches[job.id] = made
        w.check_lease_exclusive(self)
        return made

    def _keep(self, watch: Watch) -> None:
        """As ``Watcher.keep``; that runs are kept for other machines makes no difference here."""
        if persisted_deadlines.running_deadlines(watch.known, is_queued=False):
            self._mark(watch, self.w.t)

    def _mark(self, watch: Watch, now: float) -> None:
        """As ``persisted_deadlines.write``."""
        self.w.attempt(*watch.ref).deadlines = persisted_deadlines.to_row(watch.known, now, "", is_queued=False)
        watch.stored_deadlines = persisted_deadlines.running_deadlines(watch.known, is_queued=False)

    # --- one attempt ---------------------------------------------------------------------------------------------------

    def _ensure_lease(self, watch: Watch) -> Points:
        began = self.w.t
        if leases.is_surely_held(watch.lease_held_at, began, LEASE):
            return
        yield POINT
        if not self.w.renew([watch.lease]):
            raise LeaseLost("another reconciler has taken it over while this one was delayed")
        watch.lease_held_at = began
        self.w.check_lease_exclusive(self)
        yield POINT

    def _submit(self, watch: Watch, segments: Any) -> Points:
        w = self.w
        yield from self._ensure_lease(watch)
        watch.known = replace(watch.known, submitted=True)
        yield CALL
        if w.rnd() < w.faults.away:
            watch.known = replace(watch.known, submitted=False, submit_not_before=w.t + 2.0)
            return
        w.engine.submit(watch.lease.job_id, watch.lease.attempt, segments)
        yield CALL

    def _poll_all(self) -> Points:
        w = self.w
        wishes = {}
        for watch in self.watches.values():
            job = w.jobs.get(watch.lease.job_id)
            if job is not None and job.lease_token == watch.lease.token:
                wishes[job.id] = DesiredState(job.phase, job.desired, job.desired_cause, job.desired_at)
        for job_id, watch in list(self.watches.items()):
            desired_state = wishes.get(job_id)
            if desired_state is None:
                del self.watches[job_id]
                continue
            if w.rnd() < w.faults.away:
                continue
            try:
                yield from self._poll(watch, desired_state)
            except LeaseLost:
                self.watches.pop(job_id, None)

    def _poll(self, watch: Watch, desired_state: DesiredState) -> Points:
        w, ref = self.w, watch.ref
        now, wall, state = w.t, w.now, w.engine.poll(ref)
        yield CALL
        watch.known = supervision.record_poll(watch.known, now, TIMING)
        if state.seen and not watch.recorded_nodes:
            w.hold(watch.lease)
            attempt = w.attempt(*ref)
            if attempt.begun_at is None:
                attempt.begun_at = max(w.engine.begun(ref).begun_at, attempt.created_at)
                ran = min(max(0.0, (wall - attempt.begun_at).total_seconds()), now - watch.known.created_at)
                watch.known = replace(watch.known, running_since=now - ran)
                self._mark(watch, now)
            watch.recorded_nodes = _NODE_0
            yield POINT
        watch.known, deed = supervision.next_action(
            watch.supervised, watch.known, state, desired_state, now, wall, TIMING
        )
        do = deed.kind
        if do is ActionKind.WAIT:
            if persisted_deadlines.is_write_due(watch, now):
                w.hold(watch.lease)
                self._mark(watch, now)
                yield POINT
            return
        if do is ActionKind.SUBMIT:
            attempt = w.attempt(*ref)
            if attempt is not None:
                w.hold(watch.lease)
                watch.known = replace(watch.known, last_queued_at=now)
                self._mark(watch, now)
                yield POINT
                yield from self._submit(watch, attempt.lineage)
        elif do is ActionKind.FINISH:
            yield from self._finish(watch, state, now)
        elif do is ActionKind.STOP:
            w.check_deadline(watch.lease, deed.cause, LIMITS, TIMING)
            self._note(watch, EventType.AGENT_STOPPED, deed.cause, "SIGTERM to the agent")
            yield POINT
            watch.known = supervision.record_stop(watch.known, deed, now)
            yield from self._signal(watch)
        elif do is ActionKind.SIGNAL:
            yield from self._signal(watch)
        else:
            w.check_deadline(watch.lease, deed.cause, LIMITS, TIMING)
            text = deed.text or "it did not end"
            self._note(watch, EventType.AGENT_KILLED, deed.cause, text)
            yield POINT
            watch.known = supervision.record_kill(watch.known, deed, text)

    def _signal(self, watch: Watch) -> Points:
        yield from self._ensure_lease(watch)
        yield CALL
        self.w.engine.stop(watch.ref)
        yield CALL
        watch.known = supervision.record_signal(watch.known, self.w.t)
        self.w.hold(watch.lease)
        self._mark(watch, self.w.t)
        yield POINT

    def _note(self, watch: Watch, kind: str, cause: Cause | None, text: str) -> None:
        job = self.w.hold(watch.lease)
        self.w.add(job, kind, watch.lease.attempt, {} if cause is None else {"cause": cause.value}, text)

    def _finish(self, watch: Watch, state: Any, now: Any) -> Points:
        w, ref = self.w, watch.ref
        watch.known = supervision.record_ending(watch.known, state, now)
        yield from self._ensure_lease(watch)
        w.fence(ref)
        yield CALL
        left = w.engine.kill(ref)
        yield CALL
        if left:
            if supervision.is_unproven(watch.known, now):
                watch.known = replace(watch.known, unproven_reported=True)
                self._note(watch, "not-proved-dead", None, "not ended")
            return
        last = w.engine.poll(ref)
        attempt, lines = w.attempt(*ref), w.engine.spool(ref)
        if attempt is not None and attempt.acked < len(lines):  # as leftover.ingest_leftover
            job = w.hold(watch.lease)
            w.store(job, attempt, _Spool(lines))
            yield POINT
        yield from self._settle(watch, supervision.collect_evidence(watch.known, last, "", w.t))
        yield POINT

    def _settle(self, watch: Watch, evidence: Any) -> Points:
        """As ``ending.settle``."""
        w, lease, ref = self.w, watch.lease, watch.ref
        base, job = w.bases.get(ref), w.jobs.get(lease.job_id)
        found = adoptable(w, w.lineage(job, lease.attempt, base), job) if job is not None else []
        yield POINT
        job, attempt = w.hold(lease), w.attempt(*ref)
        if attempt.base_step is None and base is not None:
            attempt.base_step, attempt.base_attempt = base.step, base.attempt
        rows = w.checkpoints[job.id]
        for step, writer, finished in found:
            if not any((row.step, row.attempt) == (step, writer) for row in rows):
                rows.append(Checkpoint(step, writer, finished))
                data = {"checkpoint": f"step-{step:012d}.a{writer:04d}"}
                w.add(job, "checkpoint-adopted", writer, data)
        newest = next(w.committed(job, w.lineage(job, attempt.number, base)), None)
        results = evidence.state.results
        facts = attempt_result.facts_of(attempt, newest, max((r.last_step for r in results), default=0))
        cause = attempt_result.cause_of(job, evidence)
        self._end(job, attempt, attempt_result.verdict(job, attempt, LIMITS, cause, facts, evidence, w.now), facts)
        del self.watches[job.id]
        self.woken = True

    def _end(self, job: Any, attempt: Any, found: attempt_result.Verdict, facts: attempt_result.Facts) -> None:
        """As ``ending._end``."""
        w, number, decision = self.w, attempt.number, found.decision
        assert decision.event is not None and decision.cause is not None
        attempt.phase, attempt.outcome, attempt.cause = AttemptPhase.ENDED, decision.outcome, decision.cause
        attempt.last_step, attempt.steps_lost, attempt.ended_at = facts.last_step, facts.lost_steps, found.ended_at
        w.lent = [None if holder == (job.id, number) else holder for holder in w.lent]
        w.check_settled(job, attempt)
        w.add(job, "attempt-ended", number, {"cause": decision.cause._value_})
        w.apply(
            job, decision.event, expected_attempt=number, reason=decision.reason, message=decision.message,
            values=attempt_result.job_values(job, attempt, decision, facts, found.seconds),
        )  # fmt: skip
        w.trace and w.trace_line(f"{self.name} ends attempt {number} of {job.id}: {decision.cause}, {decision.event}")


class _Spool:
    """All of it, as one batch."""

    __slots__ = ("from_seq", "messages")

    def __init__(self, lines: list[Any]) -> None:
        self.from_seq, self.messages = 1, lines


_NODE_0: Final = frozenset({0})


def adoptable(world: Any, segments: Any, job: Any) -> list[tuple[int, int, bool]]:
    """On the disk, on the lineage, and not in the rows; the oldest first."""
    known = {(row.step, row.attempt) for row in world.checkpoints[job.id]}
    there = sorted(world.disk.get(job.id, {}).items())
    return [(*place, done) for place, done in there if place not in known and lineage_contains(segments, *place)]
