"""Faults planted in the control plane, one at a time: a simulation that does not find them would prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import sqlalchemy as sa

from ratchet_contract.phases import Desired, Event, JobPhase
from ratchet_service.agent_reports import ingest
from ratchet_service.db import leases
from ratchet_service.db.models import Job
from ratchet_service.launchers import attempt_files
from ratchet_service.lifecycle import attempt_result, monotonic_deadlines, supervision
from ratchet_service.lifecycle.decide import decide
from ratchet_service.reconciler import apply_schedule, finish_attempt, persisted_deadlines
from ratchet_service.reconciler.launch import AttemptLauncher
from ratchet_service.scheduling import queue_queries, scheduler, slots
from ratchet_service.scheduling.preemption import PreemptionPlanner
from tests.support.sim.engine import SimLauncher
from tests.support.sim.processes import START


@contextmanager
def cancel_ignored() -> Iterator[None]:
    """``decide`` does not see that a cancel was requested."""

    def decide_without_cancel(view: Any, now: Any) -> Any:
        return decide(replace(view, desired=Desired.RUN) if view.desired is Desired.CANCEL else view, now)

    with (
        patch.object(attempt_result, "decide", decide_without_cancel),
        patch.object(supervision, "decide", decide_without_cancel),
    ):
        yield


@contextmanager
def suspend_forgotten() -> Iterator[None]:
    """An end that should suspend the job queues it again."""

    def decide_without_suspend(view: Any, now: Any) -> Any:
        found = decide(view, now)
        return replace(found, event=Event.END_REQUEUE) if found.event is Event.END_SUSPENDED else found

    with patch.object(attempt_result, "decide", decide_without_suspend):
        yield


@contextmanager
def settled_alive() -> Iterator[None]:
    """An attempt is ended while a part of it is alive."""
    original = SimLauncher.kill

    def kill(self: Any, ref: Any) -> list[str]:
        original(self, ref)
        return []

    with patch.object(SimLauncher, "kill", kill):
        yield


@contextmanager
def _changed_job_values(change: Callable[[Job, dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """``change`` returns the columns of a job that an attempt's end writes in place of the right ones."""
    original = finish_attempt.job_values

    def values(job: Any, *args: Any) -> Any:
        found = original(job, *args)
        return found | change(job, found)

    with patch.object(finish_attempt, "job_values", values):
        yield


def counted_twice() -> AbstractContextManager[None]:
    """A preemption counts twice, with all earlier ones."""
    return _changed_job_values(lambda _, found: {"preemptions": found["preemptions"] * 2})


def failure_counted_twice() -> AbstractContextManager[None]:
    """A failure counts twice."""
    return _changed_job_values(lambda job, found: {"failures": found["failures"] + (found["failures"] > job.failures)})


def epoch_again() -> AbstractContextManager[None]:
    """The number of an attempt that never trained is free again."""
    return _changed_job_values(lambda job, found: {} if "step" in found else {"attempt": job.attempt - 1})


def epoch_skipped() -> AbstractContextManager[None]:
    """The number after that of an attempt that never trained is left out."""
    return _changed_job_values(lambda job, found: {} if "step" in found else {"attempt": job.attempt + 1})


@contextmanager
def no_expiry() -> Iterator[None]:
    """A lease is free before it has expired."""
    with patch.object(leases, "is_expired", lambda *_: True):
        yield


@contextmanager
def renewed_and_taken() -> Iterator[None]:
    """A lease that was free is taken, although its owner has renewed it meanwhile."""
    original = leases.acquire

    def acquire(session: Any, free: Any, *args: Any) -> Any:
        expires_at = session.scalar(sa.select(Job.lease_expires_at).where(Job.id == free.job_id))
        return original(session, free._replace(expires_at=expires_at), *args)

    with patch.object(leases, "acquire", acquire):
        yield


@contextmanager
def no_token() -> Iterator[None]:
    """A reconciler writes about a job whose lease it has lost."""
    with patch.object(leases, "has_lease", lambda *_: True):
        yield


@contextmanager
def late_submission() -> Iterator[None]:
    """No reconciler checks before a call of the launcher that it still has the lease, and no file declares an attempt over."""
    with patch.object(leases, "is_surely_held", lambda *_: True), patch.object(attempt_files, "fence", lambda _: None):
        yield


@contextmanager
def submit_first() -> Iterator[None]:
    """The launcher is called before the attempt's row is committed."""
    original = AttemptLauncher._start

    def start(self: Any, *args: Any) -> Any:
        launched = original(self, *args)
        if launched is not None and launched.plan is not None:
            self._launchers[launched.plan.launch.spec.launcher.kind].submit(launched.plan)
        return launched

    with patch.object(AttemptLauncher, "_start", start):
        yield


@contextmanager
def no_launch_lock() -> Iterator[None]:
    """On PostgreSQL two reconcilers launch at one time."""
    original = AttemptLauncher._carry_out

    def carry_out(self: Any, *args: Any) -> Any:
        with patch.object(self, "_database", SimpleNamespace(is_sqlite=True, clock=self._database.clock)):
            return original(self, *args)

    with patch.object(AttemptLauncher, "_carry_out", carry_out):
        yield


@contextmanager
def slots_forgotten() -> Iterator[None]:
    """Slots that an attempt holds are lent again."""
    with patch.object(scheduler, "Board", lambda capacity, _: slots.Board(capacity, ())):
        yield


@contextmanager
def equals_preempted() -> Iterator[None]:
    """An attempt is stopped for a job of the same priority."""
    choose, stoppable = PreemptionPlanner.choose_victims, apply_schedule._still_stoppable

    def choose_victims(self: Any, owner: str, priority: int, *needs: Any) -> Any:
        return choose(self, owner, priority + 1, *needs)

    def still_stoppable(session: Any, job: Any, victims: Any) -> bool:
        higher: Any = SimpleNamespace(priority=job.priority + 1)
        return stoppable(session, higher, victims)

    with (
        patch.object(PreemptionPlanner, "choose_victims", choose_victims),
        patch.object(PreemptionPlanner, "can_help", lambda *_: True),
        patch.object(apply_schedule, "_still_stoppable", still_stoppable),
    ):
        yield


@contextmanager
def backoff_forgotten() -> Iterator[None]:
    """A job is launched during its back-off."""
    with patch.object(queue_queries, "is_due", lambda _: Job.phase == JobPhase.QUEUED):
        yield


@contextmanager
def no_fence() -> Iterator[None]:
    """Reports of an attempt that is over are stored."""
    with patch.object(ingest, "raise_if_stale", lambda *_: None):
        yield


@contextmanager
def fenced_once() -> Iterator[None]:
    """A report is stored although its attempt has ended since the service first read its rows."""
    read, check = ingest._read_report_rows, ingest.raise_if_stale
    locked = False

    def read_rows(*args: Any, lock: bool = False) -> Any:
        nonlocal locked
        locked = lock
        return read(*args, lock=lock)

    def raise_if_stale(*rows: Any) -> None:
        if not locked:
            check(*rows)

    with patch.object(ingest, "_read_report_rows", read_rows), patch.object(ingest, "raise_if_stale", raise_if_stale):
        yield


@contextmanager
def stored_twice() -> Iterator[None]:
    """Messages that were acknowledged are stored again when they arrive again."""
    with patch.object(ingest, "unstored_messages", lambda batch, _: list(batch.messages)):
        yield


@contextmanager
def nothing_adopted() -> Iterator[None]:
    """Checkpoints whose report was lost get no row."""
    with patch.object(finish_attempt, "find_adoptable", lambda *_, **__: []):
        yield


@contextmanager
def counts_jumps() -> Iterator[None]:
    """Deadlines are counted by the wall clock."""
    original = supervision.next_action

    def next_action(one: Any, known: Any, state: Any, desired: Any, _: float, wall: Any, timing: Any) -> Any:
        return original(one, known, state, desired, (wall - START).total_seconds(), wall, timing)

    with patch.object(supervision, "next_action", next_action):
        yield


@contextmanager
def restarts_deadlines() -> Iterator[None]:
    """A reconciler that takes a job over counts its deadlines from 0."""
    with patch.object(persisted_deadlines, "restore", lambda known, *_, **__: known):
        yield


@contextmanager
def believes_gaps() -> Iterator[None]:
    """A reconciler that takes a job over counts an hour in which no reconciler supervised it."""
    original = monotonic_deadlines.carried_seconds

    def carried_seconds(*args: Any) -> float | None:
        return None if original(*args) is None else 3600.0

    with patch.object(monotonic_deadlines, "carried_seconds", carried_seconds):
        yield


MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    made.__name__: made
    for made in (
        cancel_ignored, suspend_forgotten, settled_alive, counted_twice, failure_counted_twice, epoch_again, epoch_skipped,
        no_expiry, renewed_and_taken, no_token, late_submission, submit_first, no_launch_lock, slots_forgotten,
        equals_preempted, backoff_forgotten, no_fence, fenced_once, stored_twice, nothing_adopted, counts_jumps,
        restarts_deadlines, believes_gaps,
    )
}  # fmt: skip
