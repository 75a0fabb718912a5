"""What one reconciler knows of one attempt under its lease: what it read once (such as settings of the spec), what this process
did (such as a submission), what the rows and the engine's status report about the attempt."""

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
"""Event of an attempt of another protocol than the service's, with nothing to continue from: it runs to its end."""


@dataclass(frozen=True)
class Timing:
    """Time limits in seconds. ``launch_deadline``: from the attempt's start, or the end of its wait in the engine's queue, until
    an agent holds its lock; ``kill_after``: from SIGTERM to SIGKILL of an agent, in some cases longer
    (``Watch.killable_after``); ``linger``: from the last agent's result, or the first failed one, until all agents must be gone;
    ``lost``: from one agent's death without a result until the other nodes' agents are killed."""

    launch_deadline: float = 60.0
    kill_after: float = 10.0
    linger: float = 20.0
    lost: float = 5.0


@dataclass(frozen=True)
class DesiredState:
    """The phase and the desired state in the job's row; read for all attempts that are polled, usually in one query.
    ``desired_cause``: why it was requested. ``desired_at``: when the attempt's end was requested; a request that replaces another
    one, such as a cancel after a suspend, keeps the time of the first. Both are None while ``desired`` is ``RUN``."""

    phase: JobPhase
    desired: Desired
    desired_cause: Cause | None
    desired_at: datetime | None

    @property
    def request_id(self) -> float | None:
        """Identifies the request, by the time at which it was made (seconds since 1970): a request that is withdrawn and made
        again gets another id. None: no time is stored."""
        return None if self.desired_at is None else self.desired_at.timestamp()


@dataclass
class Watch:
    """The state of one attempt under this process's lease. All times are of this process's monotonic clock. What began under an
    earlier reconciler is dated back by the time that has been counted of it (``persisted_deadlines``)."""

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
        """Return the seconds from SIGTERM to SIGKILL of an agent. ``policy.stop_grace`` is added if the SIGTERM is the first that
        the agent receives of a stop, since it then starts its save only now: at ``policy.timeout``, and for an agent of another
        protocol, which receives no stop request. Other agents have had that time after their stop request."""
        first = self.other_protocol or self.forced_cause is Cause.TIMEOUT
        return timing.kill_after + (self.limits.stop_grace if first else 0.0)


def is_over(state: AttemptState) -> bool:
    """True if all agents have written their result, or if one agent's result makes the others end: that agent failed, was lost or
    had started no rank, and not just as a consequence of another node's end. An agent that ends successfully does not end those
    of other nodes."""
    results = state.results
    return len(results) == len(state.nodes) or any(
        not r.secondary and (r.cause.is_failure or not r.ranks) for r in results
    )


def restore_actions(session: Session, watch: Watch, now: float) -> None:
    """Read from the job's history what an earlier reconciler has recorded for this attempt (SIGTERM, kill, left to run to its
    end), and set it in ``watch``. ``now``: the monotonic time at which these are assumed to have happened; the caller later
    replaces it by the stored time, if there is one (``persisted_deadlines.restore``)."""
    query = sa.select(models.Event).where(
        models.Event.job_id == watch.lease.job_id, models.Event.attempt == watch.lease.attempt
    )
    for event in session.scalars(query.where(models.Event.type.in_((STOPPED, KILLED, LEFT))).order_by(models.Event.id)):
        restore_action(watch, event, now)


def restore_action(watch: Watch, event: models.Event, now: float) -> None:
    """Set in ``watch`` what one event of the history (``LEFT``, ``STOPPED`` or ``KILLED``) records. ``now``: as in
    ``restore_actions``. A recorded SIGTERM counts as not sent, so that it is sent again: the event was written before the SIGTERM
    was sent. Makes no query."""
    if event.type == LEFT:
        watch.left_running = True
        return
    if "cause" in event.data:  # otherwise it was killed because of another agent's result
        watch.forced_cause = Cause(event.data["cause"])
    watch.stopped_at, watch.signal_unsent = now, True
    if event.type == KILLED:
        watch.killing, watch.message = True, event.message


def read_desired_states(session: Session, leases: list[Lease]) -> dict[str, DesiredState]:
    """Return job id -> phase and desired state of the jobs of ``leases``, read in one query. Jobs that were deleted, or whose
    lease this process no longer holds, are missing in the result."""
    query = sa.select(Job.id, Job.lease_token, Job.phase, Job.desired, Job.desired_cause, Job.desired_at)
    rows = session.execute(query.where(Job.id.in_([lease.job_id for lease in leases])))
    tokens = {lease.job_id: lease.token for lease in leases}
    return {row[0]: DesiredState(*row[2:]) for row in rows if row[1] == tokens[row[0]]}


def agent_started_at(agent_file: Path, now: datetime) -> datetime:
    """Return when the agent wrote ``agent_file``, which it does at its start; at most ``now``, and ``now`` if the file cannot be
    read. The first poll may come much later, as after a time without a reconciler."""
    try:
        return min(now, datetime.fromtimestamp(agent_file.stat().st_mtime, UTC))
    except OSError:
        return now


def left_running_text(watch: Watch) -> str:
    """Return the event text for a script of another protocol that is left to run to its end."""
    return (
        f"its agent uses protocol {watch.protocol}, this service {PROTOCOL_VERSION}, so it cannot report: it is a script "
        f"without a Session, which would start from its first line, so it runs to its end, and its result is then read from "
        f"the disk. To restart it under this version: `ratchet preempt {watch.ref.job_id}`"
    )


def kill_text(cause: Cause | None, state: AttemptState, logs: str) -> str:
    """Return the message that says why an attempt was killed. ``state``: the last poll; ``logs``: what the agents and the engine
    printed, used only if no agent started within the launch deadline."""
    if cause is Cause.LAUNCHER_ERROR and not state.seen:
        notes = "; ".join(f"node {i}: {node.note}" for i, node in enumerate(state.nodes) if node.note)
        details = "; ".join(part for part in (notes, logs) if part)
        return "no agent started within the launch deadline: it was killed" + (f" ({details})" if details else "")
    if state.waiting is not None and not state.seen:
        return "removed from the engine's queue before any agent had started"
    if cause is Cause.TIMEOUT:
        return "policy.timeout is reached and the agent did not end after SIGTERM: it was killed"
    return "the agent did not end within policy.stop_grace and after SIGTERM: it was killed"
