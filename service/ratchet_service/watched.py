"""What is known of one attempt under a lease: what was read once (spec, times), what this process did (submitted, asked to stop),
what the rows and an engine's look say of it.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import Cause, Desired, JobPhase, Outcome
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service import models
from ratchet_service.decision import Decision, JobView, Limits
from ratchet_service.launchers.base import AttemptRef, AttemptState, EngineEnd, Launcher
from ratchet_service.leases import Lease
from ratchet_service.models import Job

STOPPED: Final = "agent-stopped"
KILLED: Final = "agent-killed"
WAITING: Final = "engine-queue"
"""Reason of a job that waits in its engine's queue, or for room for its request; the message is the engine's."""
LEFT: Final = "agent-left"
"""Of another protocol than the service's, with nothing to go on from: it runs to its end."""


@dataclass(frozen=True)
class Timing:
    """Seconds. ``launch_deadline``: from the attempt's start, or the end of its wait in the engine's queue, until an agent holds
    its lock; ``kill_after``: from SIGTERM to SIGKILL of an agent; ``linger``: from the last agent's result, or the first failed
    one, until all of them must be gone; ``lost``: from one agent's death without a result until the other nodes' are killed."""

    launch_deadline: float = 60.0
    kill_after: float = 10.0
    linger: float = 20.0
    lost: float = 5.0


@dataclass(frozen=True)
class Wish:
    """What the row says now; read for all watched jobs at once in every round."""

    phase: JobPhase
    desired: Desired
    desired_cause: Cause | None
    desired_at: datetime | None

    @property
    def which(self) -> float | None:
        """Tells this wish from one that is made after it was taken back."""
        return None if self.desired_at is None else self.desired_at.timestamp()


@dataclass(frozen=True)
class Evidence:
    """The launcher's last look, and what the reconciler knows besides. ``forced`` is the cause it killed or stopped the attempt
    for; ``killed``: agents that had their time after the first one's result were ended by force; ``logs`` the end of what was
    printed by agents that never began; ``ran`` how many seconds it ran at the most, by a clock that nobody sets (``steady``)."""

    state: AttemptState
    forced: Cause | None = None
    message: str | None = None
    killed: bool = False
    logs: str = ""
    ran: float | None = None


@dataclass
class Watch:
    """One attempt under our lease. All its times are of this process's monotonic clock. What began under an earlier reconciler
    began so long ago as has been counted of it (``marks``)."""

    lease: Lease
    ref: AttemptRef
    launcher: Launcher
    limits: Limits
    ranks_per_node: int
    view: JobView
    held_at: float  # before the lease was taken or renewed last
    made_at: float  # the attempt was made then at the latest
    waited_until: float  # the last look that saw it in the engine's queue, or came after a long time without one
    looked_at: float
    running_since: float | None = None  # so that what lies behind it is what the attempt has run
    protocol: int = PROTOCOL_VERSION  # of its launch file, and so of its agents
    unmanaged: bool = False  # known to be a script without a Session
    left: bool = False  # the history tells that it is left to run to its end
    submitted: bool = False
    submit_at: float | None = None  # not before; the engine was away or full
    full: str | None = None  # the engine had no room for the request, and why
    recorded: frozenset[int] = frozenset()  # nodes whose agent's pid is in the database
    said: tuple[str, str] | None = None  # why it waits, as reason and message of the job's row
    said_under: Desired = Desired.RUN  # the wish then: another one has cleared the row
    wished_since: float | None = None  # the first look that saw the wish to end it
    wish_of: float | None = None  # which wish that is: ``Wish.which``
    stopped_at: float | None = None
    unsent: bool = False  # the history tells of a SIGTERM; that the engine has taken it is not known
    forced: Cause | None = None
    killing: bool = False
    result_seen_at: float | None = None
    lost_since: float | None = None
    ending_since: float | None = None
    ends: tuple[EngineEnd, ...] = ()  # what the engine has said since then
    unproven: bool = False
    message: str | None = field(default=None)
    failures: int = 0  # looks in a row that raised
    paused_until: float = -math.inf
    trouble: str | None = None  # why it cannot be looked after, as the job's row has it
    evidence: Evidence | None = None  # it is proved dead, and its end waits until others' are over
    end: Future[Decision] | None = None  # it is dead, and what it left is being taken in, beside the rounds
    marked: dict[str, float] = field(default_factory=dict)  # ``marks.running`` as the attempt's row has it

    @property
    def other_protocol(self) -> bool:
        return self.protocol != PROTOCOL_VERSION

    def killable_after(self, timing: Timing) -> float:
        """Seconds from SIGTERM to SIGKILL. An agent that hears of no wish saves behind it; others have had their time."""
        return timing.kill_after + (self.limits.stop_grace if self.other_protocol else 0.0)


def is_over(state: AttemptState) -> bool:
    """All agents have had their last word, or one's makes the others end: it failed, or had started no rank. Who ends well on
    one node leaves the others to their work, as on one node a rank leaves the other ranks."""
    results = state.results
    return len(results) == len(state.nodes) or any(
        not r.secondary and (r.cause.outcome in (Outcome.FAILED, Outcome.LOST) or not r.ranks) for r in results
    )


def remember(session: Session, watch: Watch, now: float) -> None:
    """What an earlier reconciler did to this attempt; ``now``: when, unless ``marks`` tells more."""
    query = sa.select(models.Event).where(
        models.Event.job_id == watch.lease.job_id, models.Event.epoch == watch.lease.epoch
    )
    for event in session.scalars(query.where(models.Event.type.in_((STOPPED, KILLED, LEFT))).order_by(models.Event.id)):
        recall(watch, event, now)


def recall(watch: Watch, event: models.Event, now: float) -> None:
    """One such event. Pure: looks at its attributes alone."""
    if event.type == LEFT:
        watch.left = True
        return
    if "cause" in event.data:  # else it was killed for what another agent's result tells
        watch.forced = Cause(event.data["cause"])
    watch.stopped_at, watch.unsent = now, True
    if event.type == KILLED:
        watch.killing, watch.message = True, event.message


def wishes(session: Session, leases: list[Lease]) -> dict[str, Wish]:
    """The rows of all watched jobs that are still ours."""
    query = sa.select(Job.id, Job.lease_token, Job.phase, Job.desired, Job.desired_cause, Job.desired_at)
    rows = session.execute(query.where(Job.id.in_([lease.job_id for lease in leases])))
    tokens = {lease.job_id: lease.token for lease in leases}
    return {row[0]: Wish(*row[2:]) for row in rows if row[1] == tokens[row[0]]}


def begun_at(agent_file: Path, now: datetime) -> datetime:
    """When the agent wrote it; a reconciler that was away looks later than that."""
    try:
        return min(now, datetime.fromtimestamp(agent_file.stat().st_mtime, UTC))
    except OSError:
        return now


def left_text(watch: Watch) -> str:
    return (
        f"its agent speaks protocol {watch.protocol}, this service {PROTOCOL_VERSION}, so it cannot report: it is a script "
        "without a Session, which would begin anew, and is left to run to its end, which is read from the disk then. To have it "
        f"started again under this version: `ratchet preempt {watch.ref.job_id}`"
    )


def kill_text(cause: Cause | None, state: AttemptState, logs: str) -> str:
    if cause is Cause.LAUNCHER_ERROR and not state.seen:
        notes = "; ".join(f"node {i}: {node.note}" for i, node in enumerate(state.nodes) if node.note)
        said = "; ".join(part for part in (notes, logs) if part)
        return "no agent started within the launch deadline: it was killed" + (f" ({said})" if said else "")
    if state.waiting is not None and not state.seen:
        return "taken out of the engine's queue, before any agent had started"
    if cause is Cause.TIMEOUT:
        return "policy.timeout is reached and the agent did not end after SIGTERM: it was killed"
    return "the agent did not end within policy.stop_grace and after SIGTERM: it was killed"
