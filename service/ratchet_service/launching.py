"""From a queued job to a new attempt: slots, row, event and phase in one transaction; only then is the launcher called.

A crash between the two leaves an attempt without an agent: the next reconciler takes the job over and submits it again from
``launch.json``, or with a new token where that was not written (``relaunch``). The launcher starts nothing twice.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from ratchet_contract.lineage import fork_for_launch, lineage
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause, Event, JobPhase
from ratchet_contract.resume import Base
from ratchet_contract.spec import JobSpec, Resolved
from ratchet_service import found_attempt, marks, queue_rows, slot_host, unrecorded
from ratchet_service.ancestry import bases_of, committed_of, fork_of
from ratchet_service.bounds import DEFAULT_BOUNDS, Bounds
from ratchet_service.clock import now_in
from ratchet_service.database import Database
from ratchet_service.decide import BEYOND
from ratchet_service.foreseen import Foreseen
from ratchet_service.ingest import hash_token
from ratchet_service.launch_files import launch_file, newest_recorded, read_launch_file, save_seconds
from ratchet_service.launchers.base import LaunchPlan
from ratchet_service.launchers.table import Launchers
from ratchet_service.leases import ACTIVE, Lease, hold, lease_values
from ratchet_service.models import Attempt, AttemptNode, Job
from ratchet_service.queueing import NO_SLOT, QUOTA, Plan, Preemption, Round, Turn, say_why
from ratchet_service.shown import pace_before
from ratchet_service.slots import Capacity, Grant
from ratchet_service.transitions import apply
from ratchet_service.unrecorded import Next

log = logging.getLogger(__name__)

NO_LAUNCHER: Final = "no-launcher"
FOREIGN_PATIENCE: Final = 10.0
"""Seconds that a job waits for another reconciler, which has its launcher, before it is told that there is none."""
_PASSES: Final = 3
"""Transactions of one look at the queue: more than one where others change meanwhile what it was made for."""
_SLOTS_LOCK: Final = 0x52_41_54_43_53_4C_4F_54  # "RATCSLOT"


@dataclass(frozen=True)
class Launched:
    """A new attempt, committed, that the launcher has yet to be told of; ``plan`` None: one that the disk knew already, which
    nobody launches again."""

    lease: Lease
    plan: LaunchPlan | None


Key = tuple[str, int]
"""A job and its newest attempt."""
Planned = tuple[LaunchFile, LaunchPlan] | Exception | None
"""What a launcher says of an attempt before the slots are held: its plan, with what that was made of, or why there is none. None:
it was not asked."""


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
        preemption: Preemption,
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> None:
        self._database = database
        self._home = home
        self._launchers = launchers
        self._capacity = capacity
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._preemption = preemption
        self._bounds = bounds

    def launch_ready(self) -> list[Launched]:
        """Start attempts for as many queued jobs as there are slots for, and tell the others why they wait.

        Who that concerns is found first, without a lock. The directories of those that start are listed then, and their launchers
        asked for their plans: a long queue keeps nobody from the database, and neither a slow disk nor a slow launcher anybody
        from the slots."""
        launched: list[Launched] = []
        listed: dict[Key, Next | OSError] = {}
        tried: set[Key] = set()
        for _ in range(_PASSES):
            plan = self._foreseen(tried)
            if plan is None:
                break
            for key in plan.starts:
                if key not in listed:
                    listed[key] = self._following(*key)
            planned = {key: self._planned(key, grant, listed[key]) for key, grant in plan.starts.items()}
            done: set[Key] = set()
            with self._database.write() as session:
                launched += self._pass(session, plan, listed, planned, done)
            # What is launched waits for nobody's disk. What others took, or could not be made, leaves its slots to those behind.
            if launched or not plan.starts:
                break
            tried |= done
        return launched

    def _foreseen(self, tried: Collection[Key]) -> Plan | None:
        """None: there is nothing to do. ``tried``: whose turn it was before in this look."""
        with self._database.read() as session:
            ready = queue_rows.due(self._database.clock.now()) & queue_rows.launched_by(self._launchers)
            if session.scalar(sa.select(Job.id).where(ready).limit(1)) is None:
                return None
            slots = self._slots_here(slot_host.elsewhere(session))
            return Foreseen(session, slots, self._capacity, self._preemption, tried).plan() or None

    def _pass(
        self,
        session: Session,
        plan: Plan,
        listed: Mapping[Key, Next | OSError],
        planned: Mapping[Key, Planned],
        done: set[Key],
    ) -> Iterator[Launched]:
        """Whose turn it is starts, once it is known which attempts the disk has of it behind the newest that its row knows
        (``listed``, by job and that attempt); else what it is given is kept for it. ``done``: whose turn it was."""
        if session.get_bind().dialect.name != "sqlite":
            # One reconciler at a time hands out slots; on SQLite the write transaction itself sees to that.
            session.execute(sa.select(sa.func.pg_advisory_xact_lock(_SLOTS_LOCK)))
        lent = slot_host.lend(session, self._lease_seconds) if self._lends else None
        round_ = Round(session, self._slots_here(lent), self._capacity, self._preemption, plan)
        for turn in round_.turns():
            key = (turn.job.id, turn.job.epoch)
            if key in listed:
                done.add(key)
                yield from self._start(session, turn, listed[key], planned.get(key))
            else:
                round_.keep(turn)

    def _planned(self, key: Key, grant: Grant, following: Next | OSError) -> Planned:
        """In no transaction: a launcher may be of others' making, and take its time. None: there is nothing to plan, or the job
        has changed since it was looked at."""
        if isinstance(following, OSError) or following.found:
            return None
        try:
            with self._database.read() as session:
                job = session.get(Job, key[0])
                if job is None or job.epoch != key[1]:
                    return None
                spec, resolved = JobSpec.model_validate(job.spec), Resolved.model_validate(job.resolved)
                token = secrets.token_urlsafe(32)
                launch = self._launch_file(session, job, following.number, spec, resolved, grant.gpus, token)
            return launch, self._launchers[spec.launcher.kind].plan(launch)
        except SQLAlchemyError:
            raise
        except Exception as error:  # settings that have changed, a row: the queue goes on
            return error

    def _following(self, job_id: str, epoch: int) -> Next | OSError:
        try:
            return unrecorded.next_attempt(self._home.job(job_id), epoch)
        except OSError as error:
            return error

    def keep_slots(self) -> None:
        """Renew that this host lends the slots; ``launch_ready`` sees whether it does."""
        if self._lends and not self._database.is_sqlite:
            with self._database.write() as session:
                slot_host.lend(session, self._lease_seconds)

    def put_off(self, session: Session, seconds: float) -> None:
        """The wall clock has jumped by so much: what waits for its back-off waits for as long as before. Jobs of other launchers
        may be another machine's, which puts them off by its own clock; with SQLite all are this one's."""
        now, jump = self._database.clock.now(), timedelta(seconds=seconds)
        if -BEYOND < jump < timedelta(0):  # it waits for a little longer
            return
        due = (Job.not_before > now - jump) & (Job.not_before <= now - jump + BEYOND)
        ours = sa.true() if self._database.is_sqlite else queue_rows.launched_by(self._launchers)
        backing_off = (Job.phase == JobPhase.QUEUED) & due & ours
        for job in session.scalars(sa.select(Job).where(backing_off).with_for_update(skip_locked=True)):
            assert job.not_before is not None
            job.not_before = min(job.not_before + jump, now + BEYOND)

    def leave_slots(self) -> None:
        """At a clean end: another host waits for half as long, in which another reconciler of this host renews them."""
        if not self._database.is_sqlite:
            with self._database.write() as session:
                slot_host.leave(session, self._lease_seconds / 2)

    @property
    def _lends(self) -> bool:
        return any(launcher.slots for launcher in self._launchers.values())

    def _slots_here(self, other: str | None) -> dict[str, bool]:
        """Launchers, and whether Ratchet keeps their slots; without those that do, while the ``other`` host lends them."""
        slots = {kind: launcher.slots for kind, launcher in self._launchers.items()}
        if other is None or not self._lends:
            return slots
        log.error("%s lends the slots of this database now: no job that needs one is started here", other)
        return {kind: needs for kind, needs in slots.items() if not needs}

    def tell_the_others(self) -> None:
        """A job whose launcher no reconciler has waits for ever, and nobody looks after what runs of it: it is told, once it has
        waited for ``FOREIGN_PATIENCE``. One that waits for slots or its owner's quota has been seen by another reconciler."""
        long_ago = self._database.clock.now() - timedelta(seconds=FOREIGN_PATIENCE)
        due = sa.or_(Job.not_before.is_(None), Job.not_before < long_ago)
        queued = (Job.phase == JobPhase.QUEUED) & due
        left = Job.phase.in_(ACTIVE) & sa.or_(Job.lease_token.is_(None), Job.lease_expires_at < long_ago)
        lost = sa.or_(queued, left) & (Job.updated_at < long_ago)
        unsaid = sa.or_(Job.reason.is_(None), Job.reason.not_in([NO_SLOT, QUOTA, NO_LAUNCHER]))
        foreign = lost & unsaid & queue_rows.launcher_kind().not_in(list(self._launchers))
        with self._database.read() as session:
            if session.scalar(sa.select(Job.id).where(foreign).limit(1)) is None:
                return
        text = "no reconciler here has the launcher that the job asks for: start one whose launchers file names it"
        with self._database.write() as session:
            told = sa.update(Job).where(foreign).values(reason=NO_LAUNCHER, message=text)
            session.execute(told.execution_options(synchronize_session=False))

    def _start(self, session: Session, turn: Turn, following: Next | OSError, planned: Planned) -> list[Launched]:
        job, spec, resolved, grant = turn.job, turn.spec, turn.resolved, turn.grant
        if isinstance(following, OSError):
            why = f"its directory cannot be read, so no number can be given to its next attempt: {following}"
            if say_why(job, Cause.LAUNCHER_ERROR.value, why):
                log.error("%s: %s", job.id, why)
            return []
        if following.found:
            columns = lease_values(session, self._owner, self._lease_seconds)
            taken = found_attempt.take_in(session, self._home, job, spec, following.number, columns)
            return [Launched(taken, None)]
        if following.skipped:
            passed = ", ".join(map(str, following.skipped))
            log.warning("%s: attempts %s are on the disk, and not in the database: passed over", job.id, passed)
        epoch, now = following.number, now_in(session)
        if isinstance(planned, Exception):
            if say_why(job, Cause.LAUNCHER_ERROR.value, f"the launcher cannot plan the attempt: {planned}"):
                log.error("%s: it waits, for its launcher cannot plan attempt %d", job.id, epoch, exc_info=planned)
            return []
        if planned is None:
            return []
        launch, plan = planned
        token = launch.report_token
        if launch != self._launch_file(session, job, epoch, spec, resolved, grant.gpus, token):
            return []  # what the plan was made of has changed since: the next look plans again
        lease = lease_values(session, self._owner, self._lease_seconds)
        attempt = Attempt(
            job_id=job.id, number=epoch, report_token_hash=hash_token(token), launch=plan.printable(), created_at=now,
            clocks=marks.made(self._database.clock),
        )  # fmt: skip
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
                "save_seconds": save_seconds(session, job.id) or 0.0,
                "pace": pace_before(session, job.id, epoch),
                "log_bytes": self._bounds.log_bytes,
            }
        )
