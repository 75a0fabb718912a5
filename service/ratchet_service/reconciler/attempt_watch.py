"""What one reconciler process knows of one attempt under its lease, from rows, the engine and its own actions."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import Cause, Desired, JobPhase
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.db import models
from ratchet_service.db.leases import Lease
from ratchet_service.db.models import Job
from ratchet_service.launchers.base import AttemptRef, AttemptState, EngineEnd, Launcher
from ratchet_service.lifecycle.attempt_result import Evidence
from ratchet_service.lifecycle.decision import Decision, JobView, Limits

STOPPED: Final = "agent-stopped"
KILLED: Final = "agent-killed"
WAITING: Final = "engine-queue"
"""Reason of a job that waits in its engine's queue, or until the engine can accept its request; the message is the engine's."""
LEFT: Final = "agent-left"
"""Event of a script without a Session whose agent has another protocol than the service: it is left to run to its end."""


@dataclass(frozen=True)
class Timing:
    """Time limits in seconds. ``launch_deadline``: for the first agent to begin. ``kill_after``: the least time from SIGTERM to
    SIGKILL. ``linger``: for all agents to end, once ``is_over`` is true. ``lost``: from the death of one agent without a result
    until the others are killed."""

    launch_deadline: float = 60.0
    kill_after: float = 10.0
    linger: float = 20.0
    lost: float = 5.0


@dataclass(frozen=True)
class DesiredState:
    """The phase and the desired state in the job's row. ``desired_cause``: why an end is requested. ``desired_at``: since when an
    end has been requested. A request that replaces an earlier one does not change this time."""

    phase: JobPhase
    desired: Desired
    desired_cause: Cause | None
    desired_at: datetime | None

    @property
    def request_id(self) -> float | None:
        """An id of the request to end the attempt: ``desired_at`` in seconds since 1970; None: no end is requested. If a request
        is withdrawn and another is made, the id changes."""
        return None if self.desired_at is None else self.desired_at.timestamp()


@dataclass
class Watch:
    """The state of one attempt under this process's lease. Times are of this process's monotonic clock."""

    lease: Lease
    ref: AttemptRef
    launcher: Launcher
    limits: Limits
    ranks_per_node: int
    view: JobView
    lease_held_at: float  # before the lease was last taken or renewed
    created_at: float  # the attempt was created then, or earlier
    last_queued_at: float  # the last poll that saw it in the engine's queue, or came after a long time without one
    polled_at: float
    running_since: float | None = None  # so that the time since then is what the attempt has run
    protocol: int = PROTOCOL_VERSION  # of its launch file, and so of its agents
    unmanaged: bool = False  # known to be a script without a Session
    left_running: bool = False  # the history records that it is left to run to its end
    submitted: bool = False
    submit_not_before: float | None = None  # not before this; the engine was unreachable or full
    engine_full_message: str | None = None  # why the engine could not accept the request
    recorded_nodes: frozenset[int] = frozenset()  # nodes whose agent's pid is in the database
    stored_reason: tuple[str, str] | None = None  # why it waits: reason and message of the job's row
    stored_reason_desired: Desired = Desired.RUN  # the desired state then: a change has cleared the row
    stop_requested_since: float | None = None  # the first poll that saw the request to end it
    stop_request_id: float | None = None  # which request that is: ``DesiredState.request_id``
    stopped_at: float | None = None
    signal_unsent: bool = False  # the SIGTERM is in the history, but the engine may not have accepted it
    forced_cause: Cause | None = None
    killing: bool = False
    result_seen_at: float | None = None
    lost_since: float | None = None
    ending_since: float | None = None
    engine_ends: tuple[EngineEnd, ...] = ()  # what the engine has reported since then
    unproven_reported: bool = False
    message: str | None = field(default=None)
    failures: int = 0  # polls in a row that raised
    paused_until: float = -math.inf
    supervision_error: str | None = None  # why it cannot be supervised, as in the job's row
    evidence: Evidence | None = None  # it is proved dead, and waits to be finalised after others
    finish_future: Future[Decision] | None = None  # it is dead, and is finalised concurrently with the rounds
    stored_deadlines: dict[str, float] = field(
        default_factory=dict
    )  # ``persisted_deadlines.running_since`` as in the attempt's row

    @property
    def other_protocol(self) -> bool:
        """True if the attempt's agents use another protocol version than this service."""
        return self.protocol != PROTOCOL_VERSION

    def killable_after(self, timing: Timing) -> float:
        """Return the least seconds from SIGTERM to SIGKILL of an agent. They include ``policy.stop_grace`` if the agents begin
        their last save only at the SIGTERM."""
        # these agents receive no stop request, and start their last save at the SIGTERM
        first = self.other_protocol or self.forced_cause is Cause.TIMEOUT
        return timing.kill_after + (self.limits.stop_grace if first else 0.0)


def is_over(state: AttemptState) -> bool:
    """True if all agents have written a result, or one agent's result makes the others end, such as a failure."""
    results = state.results
    return len(results) == len(state.nodes) or any(
        not r.secondary and (r.cause.is_failure or not r.ranks) for r in results
    )


def restore_actions(session: Session, watch: Watch, now: float) -> None:
    """Set in ``watch`` what the job's history records of this attempt: a SIGTERM, a kill, or that it is left to run to its end. A
    SIGTERM counts as not sent yet. ``now``: the monotonic time that is set as the time of the SIGTERM or kill."""
    query = sa.select(models.Event).where(
        models.Event.job_id == watch.lease.job_id, models.Event.attempt == watch.lease.attempt
    )
    for event in session.scalars(query.where(models.Event.type.in_((STOPPED, KILLED, LEFT))).order_by(models.Event.id)):
        restore_action(watch, event, now)


def restore_action(watch: Watch, event: models.Event, now: float) -> None:
    """Set in ``watch`` what one event (``LEFT``, ``STOPPED`` or ``KILLED``) records. ``now``: as in ``restore_actions``."""
    if event.type == LEFT:
        watch.left_running = True
        return
    if "cause" in event.data:  # otherwise it was killed because of another agent's result
        watch.forced_cause = Cause(event.data["cause"])
    # the event was written before the SIGTERM was sent: it is sent again
    watch.stopped_at, watch.signal_unsent = now, True
    if event.type == KILLED:
        watch.killing, watch.message = True, event.message


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
        f"its agent uses protocol {watch.protocol}, this service {PROTOCOL_VERSION}, so it cannot report: it is a script "
        f"without a Session, which would start from its first line, so it runs to its end, and its result is then read from "
        f"the disk. To restart it under this version: `ratchet preempt {watch.ref.job_id}`"
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
