"""A job's history and rows as both lanes tell them: every transition, stop, kill, commit and end with its time; then the columns
that decide what comes next. Left out is what the model has none of: messages, reasons, and the events in ``_ONLY_REAL``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa

from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, AttemptNode, Checkpoint, Event, Job
from tests.support.sim_in_memory.launching import CALL
from tests.support.sim_in_memory.world import World

_ONLY_REAL: Final = frozenset({"submitted", "stale-request", "engine-unreachable", "clock-jumped"})
_FACTS: Final = (
    "from", "to", "desired", "attempt", "base_step", "base_attempt", "from_step", "cause", "checkpoint",
)  # fmt: skip
_OF_JOB: Final = (
    "phase", "desired", "desired_cause", "attempt", "step", "committed_step", "committed_attempt", "preemptions",
    "failures", "attempts_without_progress", "retries", "not_before", "running_seconds", "paused_seconds", "paused_at",
    "started_at", "ended_at",
    "resume_from", "preempting_since", "checkpoint_request", "lease_expires_at",
)  # fmt: skip
_OF_ATTEMPT: Final = (
    "number", "phase", "outcome", "cause", "base_step", "base_attempt", "last_step", "steps_lost", "created_at", "begun_at",
    "training_at", "ended_at",
)  # fmt: skip


def history_lines(
    job: Any, attempts: Iterable[Any], slots: Iterable[Any], commits: Iterable[Any], events: Iterable[Any]
) -> list[str]:
    """Rows of either lane, looked at by their attributes. ``slots``: of each attempt."""
    out = [
        f"{event.at:%H:%M:%S.%f} {event.attempt} {event.type} "
        + " ".join(f"{name}={event.data[name]}" for name in _FACTS if event.data.get(name) is not None)
        for event in events
        if event.type not in _ONLY_REAL
    ]
    out.append("job " + " ".join(f"{name}={_plain(getattr(job, name))}" for name in _OF_JOB))
    for one, cpus in zip(attempts, slots, strict=True):
        out.append(f"attempt cpus={tuple(cpus)} " + " ".join(f"{n}={_plain(getattr(one, n))}" for n in _OF_ATTEMPT))
    return [
        *out,
        "commits "
        + " ".join(f"{row.step}.{row.attempt}" for row in sorted(commits, key=lambda r: (r.step, r.attempt))),
    ]


def _plain(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def of_rows(database: Database, job_id: str) -> list[str]:
    with database.read() as session:
        attempts = list(session.scalars(sa.select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.number)))
        nodes = sa.select(AttemptNode.cpu_slots).where(AttemptNode.job_id == job_id).order_by(AttemptNode.attempt)
        return history_lines(
            session.get_one(Job, job_id), attempts, session.scalars(nodes),
            session.scalars(sa.select(Checkpoint).where(Checkpoint.job_id == job_id)),
            session.scalars(sa.select(Event).where(Event.job_id == job_id).order_by(Event.id)),
        )  # fmt: skip


class Kept(World):
    """A world that stands at calls of the engine alone, and keeps the histories of jobs that are deleted. Nobody sets a wall
    clock: what the service then puts off is not in the model."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lowest=CALL)
        self.faults = replace(self.faults, sets=0.0)
        self.kept: dict[str, list[str]] = {}

    def histories(self) -> dict[str, list[str]]:
        """By job."""
        raise NotImplementedError


class Modelled(Kept):
    """The fast lane itself."""

    def histories(self) -> dict[str, list[str]]:
        return self.kept | {job_id: self._told(job_id) for job_id in self.jobs}

    def _told(self, job_id: str) -> list[str]:
        attempts = self.attempts[job_id]
        slots = [one.cpus for one in attempts]
        return history_lines(self.jobs[job_id], attempts, slots, self.checkpoints[job_id], self.events[job_id])

    def _delete(self, job: Any) -> None:
        history = self._told(job.id)
        super()._delete(job)
        self.kept[job.id] = history
