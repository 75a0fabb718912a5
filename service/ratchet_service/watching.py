"""One active job, looked after under a lease: a look at its agent, and what follows from it.

A ``Watch`` keeps what was read once (spec, times) and what this process did (submitted, asked to stop). What another process
must know after a crash is an event row written *before* the deed: ``agent-stopped`` and ``agent-killed``, each with the cause.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause, Desired, JobPhase
from ratchet_contract.spec import JobSpec
from ratchet_service import models
from ratchet_service.database import Database, utc_now
from ratchet_service.decide import decide
from ratchet_service.decision import Action, Alive, Decision, JobView, Limits
from ratchet_service.ending import Evidence, settle
from ratchet_service.launchers.base import AttemptRef, Launcher, LaunchError, LaunchPlan, NodeState
from ratchet_service.launching import Launching, limits_of, view_of
from ratchet_service.leases import Lease, hold
from ratchet_service.leftover import ingest_leftover
from ratchet_service.models import Attempt, AttemptNode, Job
from ratchet_service.transitions import add_event

log = logging.getLogger(__name__)

STOPPED: Final = "agent-stopped"
KILLED: Final = "agent-killed"
_UNPROVEN_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Timing:
    """Seconds. ``launch_deadline``: from the attempt's start until the agent holds its lock; ``kill_after``: from SIGTERM to
    SIGKILL of an agent; ``linger``: from an agent's result until it must be gone."""

    launch_deadline: float = 60.0
    kill_after: float = 10.0
    linger: float = 20.0


@dataclass(frozen=True)
class Wish:
    """What the row says now; read for all watched jobs at once in every round."""

    phase: JobPhase
    desired: Desired
    desired_cause: Cause | None
    desired_at: datetime | None


@dataclass
class Watch:
    """One attempt under our lease."""

    lease: Lease
    ref: AttemptRef
    limits: Limits
    world_size: int
    view: JobView
    created_at: datetime
    submitted: bool = False
    recorded: bool = False  # the agent's pid is in the database
    stopped_at: datetime | None = None
    forced: Cause | None = None
    killing: bool = False
    result_seen_at: datetime | None = None
    ending_since: datetime | None = None
    unproven: bool = False
    message: str | None = field(default=None)


class Watcher:
    """Carries out what ``decide`` says about watched jobs. Raises ``LeaseLost`` when a job is not ours any more."""

    def __init__(
        self, database: Database, home: HomePaths, launcher: Launcher, launching: Launching, timing: Timing
    ) -> None:
        self._database = database
        self._home = home
        self._launcher = launcher
        self._launching = launching
        self._timing = timing

    def begin(self, lease: Lease) -> Watch:
        """Start to look after a job: load it, and what was done to its attempt before."""
        with self._database.read() as session:
            job = session.get_one(Job, lease.job_id)
            attempt = session.get_one(Attempt, (lease.job_id, lease.epoch))
            spec = JobSpec.model_validate(job.spec)
            limits = limits_of(spec)
            ref = AttemptRef(lease.job_id, lease.epoch, self._home.job(lease.job_id).attempt(lease.epoch))
            watch = Watch(lease, ref, limits, spec.world.size, view_of(job, limits), attempt.created_at)
            _remember(session, watch)
        return watch

    def submit(self, watch: Watch, plan: LaunchPlan | None = None) -> None:
        """Hand the attempt to the launcher; ``plan`` None: make it again from what is stored."""
        watch.submitted = True
        try:
            self._launcher.submit(plan or self._launching.relaunch(watch.lease))
        except LaunchError as error:
            watch.forced, watch.message = Cause.LAUNCHER_ERROR, error.detail

    def look(self, watch: Watch, wish: Wish) -> Decision | None:
        """One round. Returns the decision that ended the attempt, or None while it goes on."""
        now = utc_now()
        state = self._launcher.poll(watch.ref)
        if state.seen and not watch.recorded:
            self._record(watch, state)
        if watch.killing:
            return self._finish(watch, state, now)
        if not state.alive:
            if not state.seen and not watch.submitted and wish.desired is Desired.RUN:
                self.submit(watch)
                return None
            if not state.seen and not watch.submitted:
                watch.forced, watch.message = wish.desired_cause, "ended before an agent was started"
            return self._finish(watch, state, now)
        return self._alive(watch, state, wish, now)

    def _alive(self, watch: Watch, state: NodeState, wish: Wish, now: datetime) -> Decision | None:
        if state.result is not None:
            watch.result_seen_at = watch.result_seen_at or now
            if (now - watch.result_seen_at).total_seconds() >= self._timing.linger:
                watch.killing = True
            return None
        asked = None if watch.stopped_at is None else (now - watch.stopped_at).total_seconds()
        alive = Alive(
            age=(now - watch.created_at).total_seconds(),
            seen=state.seen,
            asked=asked,
            asked_cause=watch.forced,
            killable_after=self._timing.kill_after,
            launch_deadline=self._timing.launch_deadline,
        )
        view = replace(
            watch.view,
            phase=wish.phase,
            desired=wish.desired,
            desired_cause=wish.desired_cause,
            desired_at=wish.desired_at,
            attempt=alive,
        )
        decision = decide(view, now)
        if decision.action is Action.STOP:
            self._note(watch, STOPPED, decision.cause, "SIGTERM to the agent")
            watch.stopped_at, watch.forced = now, decision.cause
            self._launcher.stop(watch.ref, self._timing.kill_after)
        elif decision.action is Action.KILL:
            text = _kill_text(decision.cause, state)
            self._note(watch, KILLED, decision.cause, text)
            watch.forced, watch.killing, watch.message = decision.cause, True, text
        return None

    def _finish(self, watch: Watch, state: NodeState, now: datetime) -> Decision | None:
        """Prove the attempt dead, take in what it left, settle. Nothing is decided while anything of it is alive."""
        watch.ending_since = watch.ending_since or now
        left = self._launcher.sweep(watch.ref)
        if left:
            waited = (now - watch.ending_since).total_seconds()
            if waited > _UNPROVEN_SECONDS and not watch.unproven:
                watch.unproven = True
                text = f"processes {left} of the attempt do not end; no new attempt starts before they are gone"
                self._note(watch, "not-proved-dead", None, text)
            return None
        state = self._launcher.poll(watch.ref)  # the last word may have come between the look and the sweep
        job_paths = self._home.job(watch.lease.job_id)
        ingest_leftover(self._database, job_paths, watch.lease, watch.world_size)
        evidence = Evidence(state.seen, state.result, watch.forced, watch.message)
        return settle(self._database, job_paths, watch.lease, watch.limits, evidence)

    def _record(self, watch: Watch, state: NodeState) -> None:
        """Who the agent is, for people and for the API."""
        assert state.agent is not None
        with self._database.write() as session:
            hold(session, watch.lease)
            node = session.get(AttemptNode, (watch.lease.job_id, watch.lease.epoch, 0))
            if node is not None:
                node.host, node.pid, node.start_time = state.agent.host, state.agent.pid, state.agent.start_time
        watch.recorded = True

    def _note(self, watch: Watch, type_: str, cause: Cause | None, message: str) -> None:
        log.info("%s: %s: %s", watch.ref.name, type_, message)
        with self._database.write() as session:
            job = hold(session, watch.lease)
            data = {} if cause is None else {"cause": cause.value}
            add_event(session, job.id, type_, message, epoch=watch.lease.epoch, data=data)


def _remember(session: Session, watch: Watch) -> None:
    """What an earlier reconciler did to this attempt."""
    query = sa.select(models.Event).where(
        models.Event.job_id == watch.lease.job_id, models.Event.epoch == watch.lease.epoch
    )
    for event in session.scalars(query.where(models.Event.type.in_((STOPPED, KILLED))).order_by(models.Event.id)):
        watch.forced = Cause(event.data["cause"])
        watch.stopped_at = event.at
        if event.type == KILLED:
            watch.killing, watch.message = True, event.message


def wishes(session: Session, leases: list[Lease]) -> dict[str, Wish]:
    """The rows of all watched jobs that are still ours."""
    query = sa.select(Job.id, Job.lease_token, Job.phase, Job.desired, Job.desired_cause, Job.desired_at)
    rows = session.execute(query.where(Job.id.in_([lease.job_id for lease in leases])))
    tokens = {lease.job_id: lease.token for lease in leases}
    return {row[0]: Wish(*row[2:]) for row in rows if row[1] == tokens[row[0]]}


def _kill_text(cause: Cause | None, state: NodeState) -> str:
    if cause is Cause.LAUNCHER_ERROR and not state.seen:
        return "the agent did not start within the launch deadline: it was killed"
    if cause is Cause.TIMEOUT:
        return "policy.timeout is reached and the agent did not end after SIGTERM: it was killed"
    return "the agent did not end within policy.stop_grace and after SIGTERM: it was killed"
