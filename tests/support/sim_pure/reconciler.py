"""A reconciler's process as a generator: it yields between every two deeds, where it may be left standing, or end.

What it does next is the service's to say (``watch_rules``, ``verdict``, ``decide``, the rules of queue and slots); the order
of reads, writes and calls of the engine is that of ``reconciler``, ``watching``, ``launching``, ``queueing`` and ``ending``.
"""

from __future__ import annotations

from typing import Any, Final

from ratchet_contract.phases import AttemptPhase, Cause
from ratchet_contract.resume import holds
from ratchet_service import leases, marks, steady, verdict, watch_rules
from ratchet_service.decision_rows import view_of
from ratchet_service.expiry import INTERVAL
from ratchet_service.leases import Lease, LeaseLost
from ratchet_service.reconciler import rested
from ratchet_service.watch_rules import Do
from ratchet_service.watched import KILLED, STOPPED, Timing, Watch, Wish, recall
from tests.support.sim_pure import launching
from tests.support.sim_pure.launching import CALL, END, LIMITS, POINT, Points
from tests.support.sim_pure.rows import LEASE, Checkpoint

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
                    self.watches[job_id].held_at = t
                    self._keep(self.watches[job_id])
                self.renewed = t
                w.trusted(self)
                yield POINT
            if not self.swept:
                self.swept = True
                w.engine.sweep(w.runs)
                yield POINT
            woken, self.woken = self.woken, False
            if woken or t >= self.look_at:
                yield from self._take_over()
                for job in w.jobs.values():
                    if launching.due(job, w.now):
                        yield from self._launch()
                        break
                self.look_at = t + w.until_next()
            if self.watches and t >= self.looks_at:
                began = w.t
                yield from self._look_at_all()
                self.looks_at = rested(began, w.t)
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
            w.trace and w.say(f"{self.name} takes {lease.job_id} over")
            self._begin(lease, held_at)
            yield POINT

    def _begin(self, lease: Lease, held_at: float) -> Watch | None:
        w = self.w
        job, attempt = w.jobs.get(lease.job_id), w.attempt(lease.job_id, lease.epoch)
        if job is None or attempt is None:
            return None
        ref: Any = (lease.job_id, lease.epoch)
        ran = steady.counted(attempt.clocks.get(marks.RUN), attempt.begun_at, w)
        since = None if ran is None else w.t - ran
        made = Watch(lease, ref, w.engine, LIMITS, 1, view_of(job, LIMITS), held_at, w.t, w.t, w.t, since)
        for event in w.events[job.id]:
            if event.epoch == lease.epoch and event.type in (STOPPED, KILLED):
                recall(made, event, w.t)
        marks.recall(made, attempt.clocks, w, LEASE / 4, TIMING.launch_deadline)
        self.watches[job.id] = made
        w.trusted(self)
        return made

    def _keep(self, watch: Watch) -> None:
        """As ``Watcher.keep``; that runs are kept for other machines makes no difference here."""
        if marks.running(watch):
            self._mark(watch, self.w.t)

    def _mark(self, watch: Watch, now: float) -> None:
        """As ``marks.write``."""
        self.w.attempt(*watch.ref).clocks = marks.stored(watch, now, "")
        watch.marked = marks.running(watch)

    # --- one attempt ---------------------------------------------------------------------------------------------------

    def _sure(self, watch: Watch) -> Points:
        began = self.w.t
        if leases.surely_held(watch.held_at, began, LEASE):
            return
        yield POINT
        if not self.w.renew([watch.lease]):
            raise LeaseLost("another reconciler has taken it over while this one was held up")
        watch.held_at = began
        self.w.trusted(self)
        yield POINT

    def _submit(self, watch: Watch, segments: Any) -> Points:
        w = self.w
        yield from self._sure(watch)
        watch.submitted = True
        yield CALL
        if w.rnd() < w.faults.away:
            watch.submitted, watch.submit_at = False, w.t + 2.0
            return
        w.engine.submit(watch.lease.job_id, watch.lease.epoch, segments)
        yield CALL

    def _look_at_all(self) -> Points:
        w = self.w
        wishes = {}
        for watch in self.watches.values():
            job = w.jobs.get(watch.lease.job_id)
            if job is not None and job.lease_token == watch.lease.token:
                wishes[job.id] = Wish(job.phase, job.desired, job.desired_cause, job.desired_at)
        for job_id, watch in list(self.watches.items()):
            wish = wishes.get(job_id)
            if wish is None:
                del self.watches[job_id]
                continue
            if w.rnd() < w.faults.away:
                continue
            try:
                yield from self._look(watch, wish)
            except LeaseLost:
                self.watches.pop(job_id, None)

    def _look(self, watch: Watch, wish: Wish) -> Points:
        w, ref = self.w, watch.ref
        now, wall, state = w.t, w.now, w.engine.poll(ref)
        yield CALL
        watch_rules.looked(watch, now, TIMING)
        if state.seen and not watch.recorded:
            w.hold(watch.lease)
            attempt = w.attempt(*ref)
            if attempt.begun_at is None:
                attempt.begun_at = max(w.engine.begun(ref).begun_at, attempt.created_at)
                ran = min(max(0.0, (wall - attempt.begun_at).total_seconds()), now - watch.made_at)
                watch.running_since = now - ran
                self._mark(watch, now)
            watch.recorded = _NODE_0
            yield POINT
        deed = watch_rules.deed(watch, state, wish, now, wall, TIMING)
        do = deed.do
        if do is Do.WAIT:
            if marks.due(watch, now):
                w.hold(watch.lease)
                self._mark(watch, now)
                yield POINT
            return
        if do is Do.SUBMIT:
            attempt = w.attempt(*ref)
            if attempt is not None:
                w.hold(watch.lease)
                watch.waited_until = now
                self._mark(watch, now)
                yield POINT
                yield from self._submit(watch, attempt.lineage)
        elif do is Do.FINISH:
            yield from self._finish(watch, state, now)
        elif do is Do.STOP:
            w.due(watch.lease, deed.cause, LIMITS, TIMING)
            self._note(watch, STOPPED, deed.cause, "SIGTERM to the agent")
            yield POINT
            watch_rules.stopping(watch, deed, now)
            yield from self._signal(watch)
        elif do is Do.SIGNAL:
            yield from self._signal(watch)
        else:
            w.due(watch.lease, deed.cause, LIMITS, TIMING)
            text = deed.text or "it did not end"
            self._note(watch, KILLED, deed.cause, text)
            yield POINT
            watch_rules.killing(watch, deed, text)

    def _signal(self, watch: Watch) -> Points:
        yield from self._sure(watch)
        yield CALL
        self.w.engine.stop(watch.ref)
        yield CALL
        watch_rules.signalled(watch, self.w.t)
        self.w.hold(watch.lease)
        self._mark(watch, self.w.t)
        yield POINT

    def _note(self, watch: Watch, kind: str, cause: Cause | None, text: str) -> None:
        job = self.w.hold(watch.lease)
        self.w.add(job, kind, watch.lease.epoch, {} if cause is None else {"cause": cause.value}, text)

    def _finish(self, watch: Watch, state: Any, now: Any) -> Points:
        w, ref = self.w, watch.ref
        watch.ending_since = now if watch.ending_since is None else watch.ending_since
        yield from self._sure(watch)
        w.fence(ref)
        yield CALL
        left = w.engine.kill(ref)
        yield CALL
        if left:
            if watch_rules.tells_unproven(watch, now):
                self._note(watch, "not-proved-dead", None, "not ended")
            return
        last = w.engine.poll(ref)
        attempt, lines = w.attempt(*ref), w.engine.spool(ref)
        if attempt is not None and attempt.acked < len(lines):  # as leftover.ingest_leftover
            job = w.hold(watch.lease)
            w.store(job, attempt, _Spool(lines))
            yield POINT
        yield from self._settle(watch, watch_rules.evidence(watch, last, "", w.t))
        yield POINT

    def _settle(self, watch: Watch, evidence: Any) -> Points:
        """As ``ending.settle``."""
        w, lease, ref = self.w, watch.lease, watch.ref
        base, job = w.bases.get(ref), w.jobs.get(lease.job_id)
        found = adoptable(w, w.lineage(job, lease.epoch, base), job) if job is not None else []
        yield POINT
        job, attempt = w.hold(lease), w.attempt(*ref)
        if attempt.base_step is None and base is not None:
            attempt.base_step, attempt.base_epoch = base.step, base.epoch
        rows = w.checkpoints[job.id]
        for step, epoch, finished in found:
            if not any((row.step, row.epoch) == (step, epoch) for row in rows):
                rows.append(Checkpoint(step, epoch, finished))
                data = {"checkpoint": f"step-{step:012d}.a{epoch:04d}"}
                w.add(job, "checkpoint-adopted", epoch, data)
        newest = next(w.committed(job, w.lineage(job, attempt.number, base)), None)
        results = evidence.state.results
        facts = verdict.facts_of(attempt, newest, max((r.last_step for r in results), default=0))
        cause = verdict.cause_of(job, evidence)
        self._end(job, attempt, verdict.verdict(job, attempt, LIMITS, cause, facts, evidence, w.now), facts)
        del self.watches[job.id]
        self.woken = True

    def _end(self, job: Any, attempt: Any, found: verdict.Verdict, facts: verdict.Facts) -> None:
        """As ``ending._end``."""
        w, number, decision = self.w, attempt.number, found.decision
        assert decision.event is not None and decision.cause is not None
        attempt.phase, attempt.outcome, attempt.cause = AttemptPhase.ENDED, decision.outcome, decision.cause
        attempt.last_step, attempt.steps_lost, attempt.ended_at = facts.last, facts.lost, found.ended_at
        w.lent = [None if holder == (job.id, number) else holder for holder in w.lent]
        w.over(job, attempt)
        w.add(job, "attempt-ended", number, {"cause": decision.cause._value_})
        w.apply(
            job, decision.event, expected_epoch=number, reason=decision.reason, message=decision.message,
            values=verdict.job_values(job, attempt, decision, facts, found.seconds),
        )  # fmt: skip
        w.trace and w.say(f"{self.name} ends attempt {number} of {job.id}: {decision.cause}, {decision.event}")


class _Spool:
    """All of it, as one batch."""

    __slots__ = ("from_seq", "messages")

    def __init__(self, lines: list[Any]) -> None:
        self.from_seq, self.messages = 1, lines


_NODE_0: Final = frozenset({0})


def adoptable(world: Any, segments: Any, job: Any) -> list[tuple[int, int, bool]]:
    """On the disk, on the lineage, and not in the rows; the oldest first."""
    known = {(row.step, row.epoch) for row in world.checkpoints[job.id]}
    there = sorted(world.disk.get(job.id, {}).items())
    return [(*place, done) for place, done in there if place not in known and holds(segments, *place)]
