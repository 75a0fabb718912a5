"""From a queued job to a new attempt: slots, row, event and phase in one transaction; only then is the launcher called.

A crash between the two leaves an attempt without an agent: the next reconciler takes the job over and submits it again from
``launch.json``, or with a new token where that was not written (``relaunch``). The launcher starts nothing twice.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import AttemptPhase, Cause, Event, JobPhase
from ratchet_contract.resume import Base
from ratchet_contract.spec import JobSpec, Resolved
from ratchet_service.ancestry import bases_of, committed_of, fork_of
from ratchet_service.clock import now_in
from ratchet_service.database import Database
from ratchet_service.decide import decide
from ratchet_service.decision import Action, Counters, Decision, JobView, Limits
from ratchet_service.ingest import hash_token
from ratchet_service.launch_files import launch_file, newest_recorded, read_launch_file, save_seconds
from ratchet_service.launchers.base import LaunchPlan
from ratchet_service.launchers.table import Launchers
from ratchet_service.leases import ACTIVE, Lease, hold, lease_values
from ratchet_service.lineage import fork_for_launch, lineage
from ratchet_service.models import Attempt, AttemptNode, Job
from ratchet_service.slots import Board, Capacity, Grant, Waiting, need_of
from ratchet_service.transitions import apply

log = logging.getLogger(__name__)

BATCH: Final = 16
"""Launches in one transaction."""
QUEUE_LOOK: Final = 500
"""Queued jobs looked at in one round, in order."""
NO_SLOT: Final = "no-slot"
NO_LAUNCHER: Final = "no-launcher"
FOREIGN_PATIENCE: Final = 10.0
"""Seconds that a job waits for another reconciler, which has its launcher, before it is told that there is none."""
_SLOTS_LOCK: Final = 0x52_41_54_43_53_4C_4F_54  # "RATCSLOT"


@dataclass(frozen=True)
class Launched:
    """A new attempt, committed, that the launcher has yet to be told of."""

    lease: Lease
    plan: LaunchPlan


class Launching:
    """Makes attempts. Holds nothing but its settings."""

    def __init__(
        self,
        database: Database,
        home: HomePaths,
        launchers: Launchers,
        capacity: Capacity,
        owner: str,
        lease_seconds: float,
    ) -> None:
        self._database = database
        self._home = home
        self._launchers = launchers
        self._capacity = capacity
        self._owner = owner
        self._lease_seconds = lease_seconds

    @property
    def _unslotted(self) -> list[str]:
        """Launchers whose engine has a queue of its own."""
        return [kind for kind, launcher in self._launchers.items() if not launcher.slots]

    def launch_ready(self) -> list[Launched]:
        """Start attempts for as many queued jobs as there are slots for, and tell the others why they wait."""
        with self._database.read() as session:
            if session.scalar(self._ready().limit(1)) is None:
                return []
        with self._database.write() as session:
            if session.get_bind().dialect.name != "sqlite":
                # One reconciler at a time hands out slots; on SQLite the write transaction itself sees to that.
                session.execute(sa.select(sa.func.pg_advisory_xact_lock(_SLOTS_LOCK)))
            return self._launch(session)

    def _ready(self) -> sa.Select[str]:
        due = sa.or_(Job.not_before.is_(None), Job.not_before <= self._database.clock.now())
        return sa.select(Job.id).where(Job.phase == JobPhase.QUEUED, due, launched_by(self._launchers))

    def _launch(self, session: Session) -> list[Launched]:
        board = Board(self._capacity, _held(session))
        out: list[Launched] = []
        for job_id in self._in_order(session, slots=True):
            out += self._launch_one(session, board, job_id)
            if board.exhausted:
                self._tell_the_rest(session)
            if board.exhausted or len(out) >= BATCH:
                break
        return out + self._launch_unslotted(session, board)

    def _launch_unslotted(self, session: Session, board: Board) -> list[Launched]:
        """Jobs that need no slot stand behind nobody who does."""
        out: list[Launched] = []
        for job_id in self._in_order(session, slots=False):
            out += self._launch_one(session, board, job_id)
            if len(out) >= BATCH:
                break
        return out

    def _in_order(self, session: Session, *, slots: bool) -> list[str]:
        unslotted = launcher_kind().in_(self._unslotted)
        ready = self._ready().where(sa.not_(unslotted) if slots else unslotted)
        return list(session.scalars(ready.order_by(Job.priority.desc(), Job.created_at, Job.id).limit(QUEUE_LOOK)))

    def _launch_one(self, session: Session, board: Board, job_id: str) -> list[Launched]:
        """The job's attempt, or none; then its row says why."""
        job = _hold_queued(session, job_id)
        if job is None:
            return []
        try:
            spec, resolved = JobSpec.model_validate(job.spec), Resolved.model_validate(job.resolved)
        except ValidationError as error:
            _unreadable(session, job, error)
            return []
        decision = decide(view_of(job, limits_of(spec)), now_in(session))
        if decision.action is Action.END:
            _give_up(session, job, decision)
        elif decision.action is Action.LAUNCH:
            slots = self._launchers[spec.launcher.kind].slots
            answer = board.ask(job.id, need_of(spec, resolved)) if slots else Grant()
            if isinstance(answer, Waiting):
                _say_why(job, NO_SLOT, answer.message)
            else:
                return self._start(session, job, spec, resolved, answer)
        return []

    def tell_the_others(self) -> None:
        """A job whose launcher no reconciler has waits for ever, and nobody looks after what runs of it: it is told, once it has
        waited for ``FOREIGN_PATIENCE``. One that waits for slots has been seen by another reconciler."""
        long_ago = self._database.clock.now() - timedelta(seconds=FOREIGN_PATIENCE)
        due = sa.or_(Job.not_before.is_(None), Job.not_before < long_ago)
        queued = (Job.phase == JobPhase.QUEUED) & due
        left = Job.phase.in_(ACTIVE) & sa.or_(Job.lease_token.is_(None), Job.lease_expires_at < long_ago)
        lost = sa.or_(queued, left) & (Job.updated_at < long_ago)
        unsaid = sa.or_(Job.reason.is_(None), Job.reason.not_in([NO_SLOT, NO_LAUNCHER]))
        foreign = lost & unsaid & launcher_kind().not_in(list(self._launchers))
        with self._database.read() as session:
            if session.scalar(sa.select(Job.id).where(foreign).limit(1)) is None:
                return
        text = "no reconciler here has the launcher that the job asks for: start one whose launchers file names it"
        with self._database.write() as session:
            told = sa.update(Job).where(foreign).values(reason=NO_LAUNCHER, message=text)
            session.execute(told.execution_options(synchronize_session=False))

    def _tell_the_rest(self, session: Session) -> None:
        """Nobody else can start: say so in one statement, to those that have not heard it."""
        others = sa.update(Job).where(
            Job.phase == JobPhase.QUEUED,
            Job.id.in_(self._ready()),
            launcher_kind().not_in(self._unslotted),
            Job.reason.is_distinct_from(NO_SLOT),
        )
        text = f"waits for CPU slots: all {self._capacity.cpus} are taken, or kept for jobs ahead of it"
        session.flush()
        session.execute(others.values(reason=NO_SLOT, message=text).execution_options(synchronize_session=False))

    def _start(self, session: Session, job: Job, spec: JobSpec, resolved: Resolved, grant: Grant) -> list[Launched]:
        epoch, token, now = job.epoch + 1, secrets.token_urlsafe(32), now_in(session)
        launch = self._launch_file(session, job, epoch, spec, resolved, grant.gpus, token)
        try:
            plan = self._launchers[spec.launcher.kind].plan(launch)
        except Exception as error:  # of a launcher that others wrote, or whose settings have changed: the queue goes on
            if _say_why(job, Cause.LAUNCHER_ERROR.value, f"the launcher cannot plan the attempt: {error}"):
                log.exception("%s: it waits, for its launcher cannot plan attempt %d", job.id, epoch)
            return []
        lease = lease_values(session, self._owner, self._lease_seconds)
        attempt = Attempt(
            job_id=job.id, number=epoch, report_token_hash=hash_token(token), launch=plan.printable(), created_at=now
        )
        session.add(attempt)
        session.flush()
        for node in range(spec.world.nodes):  # slots are of one machine, whose jobs have one node
            gpus, cpus = (list(grant.gpus), list(grant.cpus)) if node == 0 else ([], [])
            session.add(AttemptNode(job_id=job.id, attempt=epoch, node=node, gpus=gpus, cpu_slots=cpus))
        # A "save now" was for the attempt that ran: this one starts from what is saved, and counts from 0.
        values: dict[str, Any] = {"epoch": epoch, "not_before": None, "checkpoint_request": 0, **lease}
        if job.started_at is None:
            values["started_at"] = now
        data = {"attempt": epoch, "gpus": list(grant.gpus), "cpu_slots": list(grant.cpus)}
        apply(session, job.id, Event.LAUNCH, message=None, values=values, data=data)
        return [Launched(Lease(job.id, epoch, lease["lease_token"]), plan)]

    def relaunch(self, lease: Lease) -> LaunchPlan:
        """The plan of an attempt that was committed but perhaps never submitted. Raises ``LeaseLost``."""
        paths = self._home.job(lease.job_id).attempt(lease.epoch)
        written = read_launch_file(paths)
        if written is not None:
            return self._launchers[written.spec.launcher.kind].plan(written)
        token = secrets.token_urlsafe(32)
        with self._database.write() as session:
            job = hold(session, lease)
            attempt = session.get_one(Attempt, (job.id, lease.epoch))
            node = session.get_one(AttemptNode, (job.id, lease.epoch, 0))
            spec, resolved = JobSpec.model_validate(job.spec), Resolved.model_validate(job.resolved)
            launch = self._launch_file(session, job, lease.epoch, spec, resolved, tuple(node.gpus), token)
            attempt.report_token_hash = hash_token(token)
            return self._launchers[spec.launcher.kind].plan(launch)

    def _launch_file(
        self,
        session: Session,
        job: Job,
        epoch: int,
        spec: JobSpec,
        resolved: Resolved,
        gpus: tuple[int, ...],
        token: str,
    ) -> LaunchFile:
        wish = None if job.resume_from is None else Base(step=job.resume_from["step"], epoch=job.resume_from["epoch"])
        fork = fork_of(job)
        segments = lineage(bases_of(session, job.id), resume_from=wish, fork=fork)
        committed = [(row.step, row.epoch) for row in committed_of(session, job.id)]
        return launch_file(self._home, job.id, epoch, spec, resolved, gpus, token, job.desired).model_copy(
            update={
                "lineage": segments,
                "recorded": newest_recorded(session, job.id, segments),
                "fork": fork_for_launch(fork, segments, committed),
                "save_seconds": save_seconds(session, job.id),
            }
        )


def launcher_kind() -> sa.ColumnElement[str]:
    """Of a job's spec, for queries. A spec that cannot be read counts as ``local``: somebody must say so."""
    return sa.func.coalesce(Job.spec["launcher"]["kind"].as_string(), "local")


def launched_by(launchers: Launchers) -> sa.ColumnElement[bool]:
    """Jobs of these launchers: another reconciler has the others'."""
    return launcher_kind().in_(list(launchers))


def limits_of(spec: JobSpec) -> Limits:
    policy = spec.policy
    return Limits(
        policy.max_preemptions,
        policy.max_failures,
        policy.backoff,
        policy.timeout,
        policy.stop_grace,
        tuple(policy.exit_codes),
    )


def view_of(job: Job, limits: Limits) -> JobView:
    """What ``decide`` may know of the row; the attempt is added by who looks after it."""
    return JobView(
        job_id=job.id,
        phase=job.phase,
        desired=job.desired,
        desired_cause=job.desired_cause,
        desired_at=job.desired_at,
        epoch=job.epoch,
        counters=Counters(job.preemptions, job.failures, job.no_progress),
        limits=limits,
        not_before=job.not_before,
        running_seconds=job.running_seconds,
    )


def _held(session: Session) -> list[Grant]:
    """By attempts that have not ended; an agent that says of itself that it has may still be alive."""
    query = sa.select(AttemptNode.gpus, AttemptNode.cpu_slots, AttemptNode.job_id).join(
        Attempt, (Attempt.job_id == AttemptNode.job_id) & (Attempt.number == AttemptNode.attempt)
    )
    rows = session.execute(query.where(Attempt.phase.in_([p for p in AttemptPhase if p is not AttemptPhase.ENDED])))
    return [Grant(tuple(gpus), tuple(cpus), job_id) for gpus, cpus, job_id in rows]


def _hold_queued(session: Session, job_id: str) -> Job | None:
    """The job's row, held; None if it is not queued any more, or somebody holds it now: then its turn comes again."""
    query = sa.select(Job).where(Job.id == job_id, Job.phase == JobPhase.QUEUED).with_for_update(skip_locked=True)
    return session.scalar(query.execution_options(populate_existing=True))


def _unreadable(session: Session, job: Job, error: ValidationError) -> None:
    """A spec stored by another version must not keep the rest of the queue from running."""
    first = error.errors(include_url=False, include_input=False)[0]
    text = (
        f"this version of Ratchet cannot read the stored spec: {first['msg']} at {first['loc']}; submit the job again"
    )
    apply(session, job.id, Event.END_FAILED, reason="spec-unreadable", message=text)


def _give_up(session: Session, job: Job, decision: Decision) -> None:
    assert decision.event is not None
    apply(session, job.id, decision.event, reason=decision.reason, message=decision.message)


def _say_why(job: Job, reason: str, message: str) -> bool:
    """Progress of a kind, so the version stays; written, and True, only when it changes."""
    if (job.reason, job.message) == (reason, message):
        return False
    job.reason, job.message = reason, message
    return True
