"""Creates new attempts of queued jobs: the launcher makes a plan, the rows are written in one transaction, and then the caller
submits the plan. After a crash in between, the next reconciler submits it (``recover_plan``)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Event, EventType, JobPhase, Reason
from ratchet_contract.protocol.lineage import lineage
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.checkpoints import run_directory_scan
from ratchet_service.checkpoints.lineage import bases_of, committed_of, filter_lineage, fork_of
from ratchet_service.checkpoints.run_directory_scan import Next
from ratchet_service.config.output_limits import DEFAULT_BOUNDS, Bounds
from ratchet_service.db.api_tokens import hash_token
from ratchet_service.db.clock import now_in
from ratchet_service.db.engine import Database
from ratchet_service.db.leases import ACTIVE, Lease, lease_values, lock_leased_job
from ratchet_service.db.models import Attempt, AttemptNode, Checkpoint, Job
from ratchet_service.db.transitions import add_event, apply
from ratchet_service.launchers.base import LaunchPlan
from ratchet_service.launchers.launch_file import build_launch_file, read_launch_file
from ratchet_service.launchers.registry import Launchers
from ratchet_service.lifecycle.bad_nodes import Exclusion
from ratchet_service.reconciler import adopt_attempt, persisted_deadlines
from ratchet_service.reconciler.apply_schedule import (
    apply_ends,
    apply_waits,
    end_unreadable,
    locked_job,
    store_wait_reason,
)
from ratchet_service.reconciler.attempt_facts import pace_before
from ratchet_service.scheduling import node_faults, queue_queries, quotas, scheduler, slot_host_lease
from ratchet_service.scheduling.scheduler import CREATION_FAILED, Key, Preemption, QueueState, Row, Schedule
from ratchet_service.scheduling.slots import Capacity, Grant

RECENT_SAVES: Final = 20
"""Number of last saves whose durations determine how much notice the next stop needs."""


log = logging.getLogger(__name__)

UNLAUNCHABLE_AFTER_SECONDS: Final = 10.0
"""Seconds that a job waits for another reconciler, which has its launcher, before its row records that there is none."""
_MAX_PASSES: Final = 3
"""Most scheduling passes in a row: another follows only if none of the planned attempts was created."""
_SLOTS_LOCK: Final = 0x52_41_54_43_53_4C_4F_54  # "RATCSLOT"


@dataclass(frozen=True)
class Launched:
    """A new attempt with committed rows, whose ``plan`` the caller has to submit; None: there is nothing to submit."""

    lease: Lease
    plan: LaunchPlan | None


_MAX_UNREADABLE_ENDS: Final = 100
"""Most jobs that one transaction ends because their stored spec cannot be read; later passes end the others."""
_MAX_READABLE: Final = 10_000
"""Most rows that a process remembers to have validated."""
Planned = tuple[LaunchFile, LaunchPlan] | Exception | None
"""What a launcher returned for an attempt before the slots are held: its plan, with the launch file that it was made from, or the
error. None: it was not called."""


@dataclass(frozen=True)
class _Found:
    """What the first decision, made in a session that only reads, has found. ``no_slot_jobs``: ids of jobs that get the reason
    ``no-slot`` if no slot is left. ``unreadable``: jobs that end because their stored spec cannot be validated."""

    plan: Schedule
    no_slot_jobs: Sequence[str]
    unreadable: Sequence[tuple[Row, ValidationError]]

    @property
    def has_changes(self) -> bool:
        """True if there is anything to write."""
        return bool(self.plan.has_changes or self.no_slot_jobs or self.unreadable)


class AttemptLauncher:
    """Creates attempts for queued jobs. Its only state: which rows it has found readable."""

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
        self._readable: dict[tuple[str, int], None] = {}  # (job id, version), the oldest first

    def launch_ready(self) -> list[Launched]:
        """Create attempts for some of the queued jobs that can start, and return them; the caller submits their plans. Other jobs
        may be stopped, ended, or get the reason why they wait."""
        next_attempts: dict[Key, Next | OSError] = {}
        tried: set[Key] = set()
        for _ in range(_MAX_PASSES):
            # without a lock, as are the job directories and the launchers, which may be slow
            found = self._schedule(tried)
            if not found.has_changes:
                break
            starts = {start.row.key: start.grant for start in found.plan.starts}
            for key in starts:
                if key not in next_attempts:
                    next_attempts[key] = self._next_attempt(*key)
            planned = {key: self._plan_launch(key, grant, next_attempts[key]) for key, grant in starts.items()}
            with self._database.write() as session:
                launched = self._carry_out(session, found, next_attempts, planned, tried)
            # Launched attempts do not wait for other jobs' disks. If none was launched, since others took the jobs or attempts
            # could not be created, the slots are free for later jobs.
            if launched or not starts:
                return launched
        return []

    def _schedule(self, tried: Container[Key]) -> _Found:
        """Make the first decision: read the queue and return what is to be done, without a change of the database. ``tried``:
        as for ``schedule``."""
        with self._database.read() as session:
            now = now_in(session)
            ready = queue_queries.is_due(now) & queue_queries.launched_by(self._launchers)
            if session.scalar(sa.select(Job.id).where(ready).limit(1)) is None:
                return _Found(Schedule(), [], [])
            slots = self._usable_slots(slot_host_lease.find_other_host(session))
            queue = self._read_state(session, slots)
            rows = queue_queries.startable_jobs(session, now, slots, self._capacity, queue.limit)
            plan = self._decide(replace(queue, rows=rows), now, tried)
            unreadable = self._find_unreadable(session, plan.compared)
            if unreadable:  # rare, and then often all of them
                unreadable += self._find_unreadable(session, [row for row in rows if row not in plan.compared])
                gone = {row.queued.job for row, _ in unreadable}
                readable = [row for row in rows if row.queued.job not in gone]
                plan = self._decide(replace(queue, rows=readable), now, tried)
            no_slot_jobs = (
                queue_queries.no_slot_jobs(session, now, rows, plan.passed_over, slots) if plan.exhausted else []
            )
            return _Found(plan, no_slot_jobs, unreadable[:_MAX_UNREADABLE_ENDS])

    def _decide(self, queue: QueueState, now: datetime, tried: Container[Key]) -> Schedule:
        """Call ``schedule`` with this machine's settings."""
        return scheduler.schedule(queue, self._capacity, self._preemption.scope, now, tried)

    def _find_unreadable(self, session: Session, rows: Sequence[Row]) -> list[tuple[Row, ValidationError]]:
        """Return those of ``rows`` whose stored spec or decisions cannot be validated, with the error."""
        unknown = {row.queued.job: row for row in rows if (row.queued.job, row.version) not in self._readable}
        out = []
        for job_id, spec, resolved in queue_queries.stored_specs(session, [*unknown]):
            row = unknown[job_id]
            try:
                JobSpec.model_validate(spec), Resolved.model_validate(resolved)
            except ValidationError as error:
                out.append((row, error))
            else:
                self._readable[job_id, row.version] = None
        while len(self._readable) > _MAX_READABLE:
            self._readable.pop(next(iter(self._readable)))
        return out

    def _read_state(self, session: Session, slots: Mapping[str, bool]) -> QueueState:
        """Read what a pass decides from, but for the queued jobs."""
        return QueueState(
            (),
            slots,
            queue_queries.active_grants(session),
            queue_queries.running_attempts(session, self._preemption.min_run_seconds),
            queue_queries.held_by_owner(session),
            quotas.limits(session),
        )

    def _carry_out(
        self,
        session: Session,
        found: _Found,
        next_attempts: Mapping[Key, Next | OSError],
        planned: Mapping[Key, Planned],
        tried: set[Key],
    ) -> list[Launched]:
        """Make the second decision, in this transaction and for the jobs that ``found`` concerns, and carry it out; return the
        new attempts. Only ``planned`` jobs start. Jobs whose attempt could not be created are added to ``tried``."""
        if not self._database.is_sqlite:
            # One reconciler at a time hands out slots; on SQLite the write transaction itself ensures that.
            session.execute(sa.select(sa.func.pg_advisory_xact_lock(_SLOTS_LOCK)))
        now = now_in(session)
        other_host = slot_host_lease.acquire(session, self._lease_seconds) if self._lends_slots else None
        slots = self._usable_slots(other_host)
        rows = queue_queries.jobs_by_id(session, now, list(slots), found.plan.concerned)
        plan = self._decide(replace(self._read_state(session, slots), rows=rows), now, tried)
        launched: list[Launched] = []
        grants: list[Grant] = []
        may_stop = True
        for start in plan.starts:
            key = start.row.key
            # a job without a plan keeps its slots: the next pass reads its directory
            job = locked_job(session, start.row) if key in planned else None
            if job is None or any(start.grant.overlaps(grant) for grant in grants):
                continue
            created = self._start(session, job, start.grant, next_attempts[key], planned[key])
            if created is not None:
                launched.append(created)
                grants.append(start.grant)
            elif job.reason == CREATION_FAILED:
                tried.add(key)
                # what was decided for the jobs behind it assumed that it starts
                may_stop = may_stop and start.row.reason == CREATION_FAILED
        for row, error in found.unreadable:
            job = locked_job(session, row)
            if job is not None:
                end_unreadable(session, job, error)
        apply_ends(session, plan.ends)
        apply_waits(session, plan.waits, may_stop=may_stop)
        if plan.exhausted:
            queue_queries.store_no_slot(session, found.no_slot_jobs, slots, self._capacity)
        return launched

    def _plan_launch(self, key: Key, grant: Grant, next_attempt: Next | OSError) -> Planned:
        """Return the launch file and the launcher's plan for the job's next attempt; None: nothing to plan. Errors are
        returned, not raised, except the database's."""
        if isinstance(next_attempt, OSError) or next_attempt.on_disk:
            return None
        try:
            with self._database.read() as session:
                job = session.get(Job, key[0])
                if job is None or job.attempt != key[1]:
                    return None
                spec, resolved = JobSpec.model_validate(job.spec), Resolved.model_validate(job.resolved)
                token = secrets.token_urlsafe(32)
                launch = self._build_launch_file(session, job, next_attempt.number, spec, resolved, grant.gpus, token)
                owner = job.owner
            # outside the transaction: a launcher may be third-party code, and slow
            return launch, replace(self._launchers[spec.launcher.kind].plan(launch), owner=owner)
        except SQLAlchemyError:
            raise
        except Exception as error:  # changed settings, a bad row: the rest of the queue continues
            return error

    def _next_attempt(self, job_id: str, attempt: int) -> Next | OSError:
        """Return which attempt comes next according to the job's directory, or the error if that cannot be read."""
        try:
            return run_directory_scan.next_attempt(self._home.job(job_id), attempt)
        except OSError as error:
            return error

    def renew_slots(self) -> None:
        """Take or renew this host's lease of the slots, if this process needs one and no other host has it."""
        if self._lends_slots and not self._database.is_sqlite:
            with self._database.write() as session:
                slot_host_lease.acquire(session, self._lease_seconds)

    def shorten_slot_lease(self) -> None:
        """Shorten this host's lease of the slots at a clean exit, so that another host can soon take them."""
        if not self._database.is_sqlite:
            with self._database.write() as session:
                slot_host_lease.shorten(session, self._lease_seconds / 2)

    @property
    def _lends_slots(self) -> bool:
        """True if this process has a launcher whose slots Ratchet manages."""
        return any(launcher.slots for launcher in self._launchers.values())

    def _usable_slots(self, other_host: str | None) -> dict[str, bool]:
        """Return the launchers that may start jobs now: name -> True if Ratchet manages its slots. ``other_host``: the other host
        that lends the slots of this database; None: there is none."""
        slots = {kind: launcher.slots for kind, launcher in self._launchers.items()}
        if other_host is None or not self._lends_slots:
            return slots
        log.error("%s now manages the slots of this database: no job that needs a slot is started here", other_host)
        return {kind: needs for kind, needs in slots.items() if not needs}

    def mark_unlaunchable_jobs(self) -> None:
        """Store the reason ``NO_LAUNCHER`` in the rows of jobs whose launcher no running reconciler seems to have."""
        long_ago = self._database.clock.now() - timedelta(seconds=UNLAUNCHABLE_AFTER_SECONDS)
        due = sa.or_(Job.not_before.is_(None), Job.not_before < long_ago)
        queued = (Job.phase == JobPhase.QUEUED) & due
        left = Job.phase.in_(ACTIVE) & sa.or_(Job.lease_token.is_(None), Job.lease_expires_at < long_ago)
        lost = sa.or_(queued, left) & (Job.updated_at < long_ago)
        # the first three show that another reconciler has seen the job
        recorded = (Reason.NO_SLOT, Reason.QUOTA, CREATION_FAILED, Reason.NO_LAUNCHER)
        unsaid = sa.or_(Job.reason.is_(None), Job.reason.not_in(recorded))
        foreign = lost & unsaid & queue_queries.launcher_kind().not_in(list(self._launchers))
        with self._database.read() as session:
            if session.scalar(sa.select(Job.id).where(foreign).limit(1)) is None:
                return
        text = "no running reconciler has the job's launcher: start one whose launchers file names it"
        with self._database.write() as session:
            told = sa.update(Job).where(foreign).values(reason=Reason.NO_LAUNCHER, message=text)
            session.execute(told.execution_options(synchronize_session=False))

    def _start(
        self, session: Session, job: Job, grant: Grant, next_attempt: Next | OSError, planned: Planned
    ) -> Launched | None:
        """Create the attempt of one job in this transaction and return it; None: the job cannot start now, or it has ended
        because its stored spec cannot be read."""
        try:
            spec, resolved = JobSpec.model_validate(job.spec), Resolved.model_validate(job.resolved)
        except ValidationError as error:
            end_unreadable(session, job, error)
            return None
        if isinstance(next_attempt, OSError):
            why = f"its directory cannot be read, so no number can be assigned to its next attempt: {next_attempt}"
            if store_wait_reason(job, CREATION_FAILED, why):
                log.error("%s: %s", job.id, why)
            return None
        if next_attempt.on_disk:
            columns = lease_values(session, self._owner, self._lease_seconds)
            adopted_lease = adopt_attempt.create_adopted_attempt(
                session, self._home, job, spec, next_attempt.number, columns
            )
            # it is not launched again: the reconciler proves it dead and ends it
            return Launched(adopted_lease, None)
        if next_attempt.skipped:
            first, last = next_attempt.skipped[0], next_attempt.skipped[-1]
            log.warning(
                "%s: attempts %d to %d are skipped: the disk has seen them, the database not", job.id, first, last
            )
        number, now = next_attempt.number, now_in(session)
        if isinstance(planned, Exception):
            if store_wait_reason(job, CREATION_FAILED, f"the launcher cannot plan the attempt: {planned}"):
                log.error("%s: it waits, since its launcher cannot plan attempt %d", job.id, number, exc_info=planned)
            return None
        if planned is None:
            return None
        launch, plan = planned
        token = launch.report_token
        if launch != self._build_launch_file(session, job, number, spec, resolved, grant.gpus, token):
            return None  # what the plan was made from has changed since: the next pass plans again
        lease = lease_values(session, self._owner, self._lease_seconds)
        attempt = Attempt(
            job_id=job.id, number=number, report_token_hash=hash_token(token), launch=plan.printable(), created_at=now,
            deadlines=persisted_deadlines.initial_deadlines(self._database.clock),
        )  # fmt: skip
        session.add(attempt)
        session.flush()
        for node in range(spec.world.nodes):  # slots belong to one machine, whose jobs have one node
            gpus, cpus = (list(grant.gpus), list(grant.cpus)) if node == 0 else ([], [])
            session.add(AttemptNode(job_id=job.id, attempt=number, node=node, gpus=gpus, cpu_slots=cpus))
        # A "save now" was for the previous attempt: this one starts from what is saved, and counts from 0.
        values: dict[str, Any] = {"attempt": number, "not_before": None, "checkpoint_request": 0, **lease}
        if job.started_at is None:
            values["started_at"] = now
        data = {"attempt": number, "gpus": list(grant.gpus), "cpu_slots": list(grant.cpus)}
        apply(session, job.id, Event.LAUNCH, message=None, values=values, data=data)
        previous = session.get(Attempt, (job.id, number - 1))
        earlier = [] if previous is None else node_faults.planned_exclusions(previous.launch)
        for one in self._exclusions(session, job, spec):
            if one.host not in earlier:
                facts = {
                    "node": one.host,
                    "causes": [fault.kind for fault in one.faults],
                    "attempts": [fault.attempt for fault in one.faults],
                    "until": one.until.isoformat(),
                }
                add_event(session, job.id, EventType.NODE_EXCLUDED, one.sentence(), attempt=number, data=facts)
        return Launched(Lease(job.id, number, lease["lease_token"]), plan)

    def recover_plan(self, lease: Lease) -> LaunchPlan:
        """Return the launcher's plan of an attempt that may not have been submitted. May store a new report token, and raise
        ``LeaseLost``."""
        paths = self._home.job(lease.job_id).attempt(lease.attempt)
        written = read_launch_file(paths)
        if written is not None:
            return self._launchers[written.spec.launcher.kind].plan(written)
        token = secrets.token_urlsafe(32)
        with self._database.write() as session:
            job = lock_leased_job(session, lease)
            attempt = session.get_one(Attempt, (job.id, lease.attempt))
            node = session.get_one(AttemptNode, (job.id, lease.attempt, 0))
            spec, resolved = JobSpec.model_validate(job.spec), Resolved.model_validate(job.resolved)
            launch = self._build_launch_file(session, job, lease.attempt, spec, resolved, tuple(node.gpus), token)
            attempt.report_token_hash = hash_token(token)
        return self._launchers[spec.launcher.kind].plan(launch)

    def _build_launch_file(
        self,
        session: Session,
        job: Job,
        attempt: int,
        spec: JobSpec,
        resolved: Resolved,
        gpus: tuple[int, ...],
        token: str,
    ) -> LaunchFile:
        """Return the launch file of the attempt, from the job's rows. ``token``: the report token of the attempt's agents."""
        resume_from = (
            None if job.resume_from is None else Base(step=job.resume_from["step"], attempt=job.resume_from["attempt"])
        )
        fork = fork_of(job)
        segments = lineage(bases_of(session, job.id), resume_from=resume_from, fork=fork)
        return build_launch_file(self._home, job.id, attempt, spec, resolved, gpus, token, job.desired).model_copy(
            update={
                "lineage": segments,
                "recorded": newest_recorded(session, job.id, segments),
                "fork": fork,
                "save_seconds": longest_save_seconds(session, job.id),
                "pace": pace_before(session, job.id, attempt),
                "log_bytes": self._bounds.log_bytes,
                "exclude_nodes": [one.host for one in self._exclusions(session, job, spec)],
            }
        )

    def _exclusions(self, session: Session, job: Job, spec: JobSpec) -> list[Exclusion]:
        """Return the nodes that the job's next attempt stays away from, by ``policy.exclude_nodes``."""
        if spec.policy.exclude_nodes == "off" or not self._launchers[spec.launcher.kind].excludes_nodes:
            return []
        return node_faults.exclusions(session, job, spec.world.nodes)


def longest_save_seconds(session: Session, job_id: str) -> float:
    """Return the longest duration in seconds among the job's last ``RECENT_SAVES`` checkpoints with a reported duration; 0.0:
    there is none."""
    query = sa.select(Checkpoint.seconds).where(Checkpoint.job_id == job_id, Checkpoint.seconds.is_not(None))
    last = session.scalars(query.order_by(Checkpoint.created_at.desc()).limit(RECENT_SAVES))
    return max((seconds for seconds in last if seconds is not None), default=0.0)


def newest_recorded(session: Session, job_id: str, segments: list[Segment]) -> Base | None:
    """Return the newest committed checkpoint of the lineage ``segments``, according to the rows; None: there is none."""
    newest = filter_lineage(segments, committed_of(session, job_id))[:1]
    return Base(step=newest[0].step, attempt=newest[0].attempt, digest=newest[0].digest) if newest else None
