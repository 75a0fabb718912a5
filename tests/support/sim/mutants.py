"""Faults planted in the control plane, one at a time: a simulation that finds none of them would prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from ratchet_service.agent_reports import ingest
from ratchet_service.db import leases
from ratchet_service.db.transitions import lock_job
from ratchet_service.launchers import attempt_files
from ratchet_service.lifecycle import supervision
from ratchet_service.reconciler import drain_spools, finish_attempt, launch, supervise
from ratchet_service.reconciler.launch import AttemptLauncher
from ratchet_service.reconciler.supervise import Watcher
from ratchet_service.scheduling import scheduler, slots
from tests.support.sim.engine import SimLauncher
from tests.support.sim.processes import START


def _any_token(session: Any, lease: Any) -> Any:
    return lock_job(session, lease.job_id)


@contextmanager
def no_token() -> Iterator[None]:
    """``hold`` takes anybody's lease for its own. Not one of ``MUTANTS``: fences and transitions refuse nearly all that it lets
    through, so by itself it breaks no rule in hundreds of schedules."""
    with (
        patch.object(supervise, "lock_leased_job", _any_token),
        patch.object(finish_attempt, "lock_leased_job", _any_token),
        patch.object(drain_spools, "lock_leased_job", _any_token),
        patch.object(launch, "lock_leased_job", _any_token),
    ):
        yield


@contextmanager
def no_expiry() -> Iterator[None]:
    """A lease is free before it has run out."""
    original = leases.free_jobs

    def free_jobs(session: Any, skip: Any, which: Any) -> Any:
        with patch.object(leases, "owner_is_dead", lambda _: True):
            return original(session, skip, which)

    with patch.object(leases, "free_jobs", free_jobs):
        yield


@contextmanager
def submit_first() -> Iterator[None]:
    """The launcher is called before the attempt's row is committed."""
    original = AttemptLauncher._start

    def start(self: Any, *args: Any) -> Any:
        launched = original(self, *args)
        for one in launched:
            self._launchers[one.plan.launch.spec.launcher.kind].submit(one.plan)
        return launched

    with patch.object(AttemptLauncher, "_start", start):
        yield


@contextmanager
def kill_believed() -> Iterator[None]:
    """An attempt is settled while something of it is alive."""
    original = SimLauncher.kill

    def kill(self: Any, ref: Any) -> list[str]:
        original(self, ref)
        return []

    with patch.object(SimLauncher, "kill", kill):
        yield


@contextmanager
def counted_twice() -> Iterator[None]:
    """Each preemption is counted twice, and with all that came before it."""
    original = finish_attempt.job_values

    def values(*args: Any) -> Any:
        found = original(*args)
        return found | {"preemptions": found["preemptions"] * 2}

    with patch.object(finish_attempt, "job_values", values):
        yield


@contextmanager
def late_submission() -> Iterator[None]:
    """Nobody asks whether the lease is still held before the launcher is called, and the disk does not tell that it is over."""
    with patch.object(Watcher, "_ensure_lease", lambda *_: None), patch.object(attempt_files, "fence", lambda _: None):
        yield


@contextmanager
def no_fence() -> Iterator[None]:
    """Reports of an attempt that is over are stored."""
    with patch.object(ingest, "raise_if_stale", lambda *_: None):
        yield


@contextmanager
def stored_twice() -> Iterator[None]:
    """What was acknowledged is stored again when it comes again."""
    original = ingest.ingest_batches

    def store(session: Any, job: Any, attempt: Any, node: Any, batches: Any, *rest: Any) -> Any:
        node.acked = {}
        return original(session, job, attempt, node, [replace_seq(batch) for batch in batches], *rest)

    def replace_seq(batch: Any) -> Any:
        return batch.model_copy(update={"from_seq": 1})

    with patch.object(ingest, "ingest_batches", store):
        yield


@contextmanager
def nothing_adopted() -> Iterator[None]:
    """Checkpoints whose report was lost are not taken in."""
    with patch.object(finish_attempt, "find_adoptable", lambda *_, **__: []):
        yield


@contextmanager
def slots_forgotten() -> Iterator[None]:
    """Slots that somebody holds are given out again."""
    with patch.object(scheduler, "Board", lambda capacity, held: slots.Board(capacity, ())):
        yield


@contextmanager
def epoch_again() -> Iterator[None]:
    """A number is left out where an attempt never trained."""
    original = finish_attempt.job_values

    def values(job: Any, *args: Any) -> Any:
        found = original(job, *args)
        return found if "resume_from" in found else found | {"attempt": job.attempt + 1}

    with patch.object(finish_attempt, "job_values", values):
        yield


@contextmanager
def counts_jumps() -> Iterator[None]:
    """Deadlines go by the wall clock."""
    original = supervision.next_action

    def deed(one: Any, known: Any, state: Any, wish: Any, _: float, wall: Any, timing: Any) -> Any:
        return original(one, known, state, wish, (wall - START).total_seconds(), wall, timing)

    with patch.object(supervision, "next_action", deed):
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    made.__name__: made
    for made in (
        no_expiry, submit_first, kill_believed, counted_twice, late_submission, no_fence, stored_twice,
        nothing_adopted, slots_forgotten, epoch_again, counts_jumps,
    )
}  # fmt: skip
