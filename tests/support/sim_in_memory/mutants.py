"""Faults planted in what the fast lane runs, one at a time: in the service's own functions where the rule is one of those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from ratchet_contract.phases import Desired, Event
from ratchet_service.agent_reports import fencing, ingest
from ratchet_service.db import leases
from ratchet_service.lifecycle import attempt_result, decide, monotonic_deadlines, supervision
from ratchet_service.reconciler import persisted_deadlines
from ratchet_service.scheduling import preemption, scheduler, slots
from tests.support.sim.mutants import counts_jumps
from tests.support.sim_in_memory import launching, reconciler
from tests.support.sim_in_memory.agents import Engine
from tests.support.sim_in_memory.database import Rows
from tests.support.sim_in_memory.reconciler import Reconciler
from tests.support.sim_in_memory.world import World


@contextmanager
def cancel_ignored() -> Iterator[None]:
    """``decide`` does not see that a cancel is wanted."""

    original = decide.decide

    def deaf(view: Any, now: Any) -> Any:
        return original(replace(view, desired=Desired.RUN) if view.desired is Desired.CANCEL else view, now)

    with patch.object(attempt_result, "decide", deaf), patch.object(supervision, "decide", deaf):
        yield


@contextmanager
def settled_alive() -> Iterator[None]:
    """An attempt is settled while something of it is alive."""
    original = Engine.kill

    def kill(self: Any, ref: Any) -> list[str]:
        original(self, ref)
        return []

    with patch.object(Engine, "kill", kill):
        yield


@contextmanager
def counted_twice() -> Iterator[None]:
    """A failure is counted twice."""
    original = attempt_result.job_values

    def values(job: Any, *args: Any) -> Any:
        found = original(job, *args)
        return found | {"failures": found["failures"] + (found["failures"] > job.failures)}

    with patch.object(attempt_result, "job_values", values):
        yield


@contextmanager
def no_expiry() -> Iterator[None]:
    """A lease is free before it has run out."""
    with patch.object(leases, "is_expired", lambda *_: True):
        yield


@contextmanager
def renewed_and_taken() -> Iterator[None]:
    """Who takes a lease looks at its token alone: its owner may have renewed it meanwhile."""
    original = Rows.take

    def take(self: Any, free: Any, owner: str) -> Any:
        job = self.jobs.get(free.job_id)
        return original(self, free if job is None else free._replace(expires_at=job.lease_expires_at), owner)

    with patch.object(Rows, "take", take):
        yield


@contextmanager
def no_token() -> Iterator[None]:
    """Anybody's lease will do for a write."""
    with patch.object(leases, "has_lease", lambda job, _: job.phase.active):
        yield


@contextmanager
def epoch_again() -> Iterator[None]:
    """An attempt that never trained has its number used again."""
    original = attempt_result.job_values

    def values(job: Any, attempt: Any, decision: Any, facts: Any, seconds: float) -> Any:
        found = original(job, attempt, decision, facts, seconds)
        return found if facts.base is not None else found | {"attempt": job.attempt - 1}

    with patch.object(attempt_result, "job_values", values):
        yield


@contextmanager
def equals_preempted() -> Iterator[None]:
    """A job of equal priority is stopped for another."""
    original, able = preemption.PreemptionPlanner.choose_victims, launching.is_stoppable

    def make(self: Any, owner: str, priority: int, need: Any, lacks: Any) -> Any:
        return original(self, owner, priority + 1, need, lacks)

    with (
        patch.object(preemption.PreemptionPlanner, "choose_victims", make),
        patch.object(preemption.PreemptionPlanner, "can_help", lambda *_: True),
        patch.object(launching, "is_stoppable", lambda row, one, priority: able(row, one, priority + 1)),
    ):
        yield


@contextmanager
def slots_forgotten() -> Iterator[None]:
    """Slots that somebody holds are given out again."""
    with patch.object(scheduler, "Board", lambda capacity, held: slots.Board(capacity, ())):
        yield


@contextmanager
def no_slots_lock() -> Iterator[None]:
    """On PostgreSQL two reconcilers hand out slots at one time."""
    with patch.object(World, "slots_lock", lambda *_: None):
        yield


@contextmanager
def late_submission() -> Iterator[None]:
    """Nobody asks whether the lease is still held before a deed, and the disk does not tell that an attempt is over."""
    with patch.object(leases, "is_surely_held", lambda *_: True), patch.object(World, "fence", lambda *_: None):
        yield


@contextmanager
def submit_first() -> Iterator[None]:
    """The engine is called before the attempt's row is there."""
    original = Reconciler._start

    def start(self: Any, job: Any, grant: Any) -> Any:
        self.w.engine.submit(job.id, launching.next_number(job), self.w.lineage(job))
        return original(self, job, grant)

    with patch.object(Reconciler, "_start", start):
        yield


@contextmanager
def no_fence() -> Iterator[None]:
    """Reports of an attempt that is over are stored."""
    with patch.object(fencing, "raise_if_stale", lambda *_: None):
        yield


@contextmanager
def fenced_once() -> Iterator[None]:
    """A report that was let in is stored without another look, whatever became of its attempt since."""
    original = Rows.ingest

    def store(self: Any, report: Any) -> Any:
        with patch.object(fencing, "raise_if_stale", lambda *_: None):
            return original(self, report)

    with patch.object(Rows, "ingest", store):
        yield


@contextmanager
def stored_twice() -> Iterator[None]:
    """What was acknowledged is stored again when it comes again."""
    with patch.object(ingest, "unstored_messages", lambda batch, done: list(batch.messages)):
        yield


@contextmanager
def nothing_adopted() -> Iterator[None]:
    """Checkpoints whose report was lost are not taken in."""
    with patch.object(reconciler, "adoptable", lambda *_: []):
        yield


@contextmanager
def backoff_forgotten() -> Iterator[None]:
    """A job that is to wait is launched."""
    with patch.object(launching, "is_due", lambda job, _: job.phase.value == "QUEUED"):
        yield


@contextmanager
def suspend_forgotten() -> Iterator[None]:
    """An end that should suspend the job queues it again."""

    original = decide.decide

    def restless(view: Any, now: Any) -> Any:
        found = original(view, now)
        return replace(found, event=Event.END_REQUEUE) if found.event is Event.END_SUSPENDED else found

    with patch.object(attempt_result, "decide", restless):
        yield


@contextmanager
def restarts_deadlines() -> Iterator[None]:
    """Who takes a job over counts its deadlines from 0."""
    with patch.object(persisted_deadlines, "restore", lambda known, *_, **__: known):
        yield


@contextmanager
def believes_gaps() -> Iterator[None]:
    """Who takes a job over counts of a deadline what nobody saw: wishes that no agent can have heard of."""
    original = monotonic_deadlines.carried_seconds
    with patch.object(
        monotonic_deadlines, "carried_seconds", lambda *asked: None if original(*asked) is None else 3600.0
    ):
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    made.__name__: made
    for made in (
        cancel_ignored, settled_alive, counted_twice, no_expiry, renewed_and_taken, no_token, epoch_again, equals_preempted,
        slots_forgotten, no_slots_lock, late_submission, submit_first, no_fence, fenced_once, stored_twice, nothing_adopted,
        backoff_forgotten, suspend_forgotten, counts_jumps, restarts_deadlines, believes_gaps,
    )
}  # fmt: skip
