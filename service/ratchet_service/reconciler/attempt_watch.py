"""What one reconciler process knows of one attempt under its lease, from rows, the engine and its own actions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import Cause, Desired, EventType, Reason
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.db import models
from ratchet_service.db.leases import Lease
from ratchet_service.db.models import Job
from ratchet_service.launchers.base import AttemptRef, AttemptState, Launcher
from ratchet_service.lifecycle.attempt_result import Evidence
from ratchet_service.lifecycle.decision import Decision, Limits
from ratchet_service.lifecycle.supervision import DesiredState, Supervised, Supervision

_RECORDED_ACTIONS: Final = (EventType.AGENT_STOPPED, EventType.AGENT_KILLED, EventType.AGENT_LEFT)


@dataclass
class Watch:
    """One attempt under this process's lease. Only ``supervise`` and the reconciler's loop change it. Times are of this process's
    monotonic clock."""

    lease: Lease
    ref: AttemptRef
    launcher: Launcher
    ranks_per_node: int
    supervised: Supervised
    known: Supervision
    lease_held_at: float  # before the lease was last taken or renewed
    engine_full_message: str | None = None  # why the engine could not accept the request
    recorded_nodes: frozenset[int] = frozenset()  # nodes whose agent's pid is in the database
    stored_reason: tuple[str, str] | None = None  # why it waits: reason and message of the job's row
    stored_reason_desired: Desired = Desired.RUN  # the desired state then: a change has cleared the row
    stored_deadlines: Mapping[str, float] = field(default_factory=dict)  # ``running_deadlines`` as in the attempt's row
    failures: int = 0  # polls in a row that raised
    paused_until: float = -math.inf
    supervision_error: str | None = None  # why it cannot be supervised, as in the job's row
    evidence: Evidence | None = None  # it is proved dead, and waits to be finalised after others
    finish_future: Future[Decision] | None = None  # it is dead, and is finalised concurrently with the rounds

    @property
    def limits(self) -> Limits:
        """The limits that the job's spec sets."""
        return self.supervised.view.limits

    @property
    def is_queued(self) -> bool:
        """True if the job's row says that the attempt waits in its engine's queue."""
        return self.stored_reason is not None and self.stored_reason[0] == Reason.ENGINE_QUEUE


def restore_actions(session: Session, lease: Lease, known: Supervision, now: float) -> Supervision:
    """Return ``known`` with what the job's history records of this attempt: a SIGTERM, a kill, or that it is left to run to its
    end. A SIGTERM counts as not sent yet. ``now``: the monotonic time that is set as the time of the SIGTERM or kill."""
    query = sa.select(models.Event).where(models.Event.job_id == lease.job_id, models.Event.attempt == lease.attempt)
    for event in session.scalars(query.where(models.Event.type.in_(_RECORDED_ACTIONS)).order_by(models.Event.id)):
        if event.type == EventType.AGENT_LEFT:
            known = replace(known, left_running=True)
            continue
        # without a cause, it was killed because of another agent's result
        cause = Cause(event.data["cause"]) if "cause" in event.data else known.forced_cause
        # the event was written before the SIGTERM was sent: it is sent again
        known = replace(known, forced_cause=cause, stopped_at=now, signal_unsent=True)
        if event.type == EventType.AGENT_KILLED:
            known = replace(known, killing=True, message=event.message)
    return known


def read_desired_states(session: Session, leases: list[Lease]) -> dict[str, DesiredState]:
    """Return job id -> desired state of those jobs of ``leases`` that this process still holds. Raise ``LookupError`` or
    ``ValueError`` if a row cannot be read."""
    query = sa.select(Job.id, Job.lease_token, Job.phase, Job.desired, Job.desired_cause, Job.desired_at)
    rows = session.execute(query.where(Job.id.in_([lease.job_id for lease in leases])))
    tokens = {lease.job_id: lease.token for lease in leases}
    return {row[0]: DesiredState(*row[2:]) for row in rows if row[1] == tokens[row[0]]}


def agent_started_at(agent_file: Path, now: datetime) -> datetime:
    """Return when the agent wrote ``agent_file``, at most ``now``; ``now`` if the file cannot be read."""
    try:
        return min(now, datetime.fromtimestamp(agent_file.stat().st_mtime, UTC))
    except (OSError, ValueError, OverflowError):  # the job's code may set any time
        return now


def left_running_text(watch: Watch) -> str:
    """Return the event text for a script of another protocol that is left to run to its end."""
    return (
        f"its agent uses protocol {watch.supervised.protocol}, this service {PROTOCOL_VERSION}, so it cannot report: it is a "
        "script without a Session, which would start from its first line, so it runs to its end, and its result is then read "
        f"from the disk. To restart it under this version: `ratchet preempt {watch.ref.job_id}`"
    )


def kill_text(cause: Cause | None, state: AttemptState, logs: str) -> str:
    """Return the message that says why an attempt was killed. ``logs``: what the agents and the engine printed."""
    if cause is Cause.LAUNCHER_ERROR and not state.seen:
        notes = "; ".join(f"node {i}: {node.note}" for i, node in enumerate(state.nodes) if node.note)
        details = "; ".join(part for part in (notes, logs) if part)
        return "no agent started within the launch deadline: it was killed" + (f" ({details})" if details else "")
    if state.waiting is not None and not state.seen:
        return "removed from the engine's queue before any agent had started"
    if cause is Cause.TIMEOUT:
        return "policy.timeout is reached and the agent did not end after SIGTERM: it was killed"
    return "the agent did not end within policy.stop_grace and after SIGTERM: it was killed"
