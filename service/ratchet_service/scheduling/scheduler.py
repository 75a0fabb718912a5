"""A scheduling pass over the queue: which jobs start, why the others wait, which attempts are stopped for them.

``fair_order`` determines the order, ``slots`` what is free, ``preemption`` which attempts are stopped for whom. ``DryRunPass`` is
a dry run of the whole pass, in a session that only reads. ``LaunchPass`` repeats the pass for the jobs that it concerns, within
the transaction that launches, and carries it out. So the lock under which slots are lent is held only briefly, however long the
queue is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.phases import Cause, Desired, Event, JobPhase
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Job
from ratchet_service.db.transitions import apply
from ratchet_service.lifecycle.decide import decide
from ratchet_service.lifecycle.decision import Action, Decision, limits_of, view_of
from ratchet_service.scheduling import queue_queries, quotas
from ratchet_service.scheduling.fair_order import Place, Queued, order_queue
from ratchet_service.scheduling.preemption import PreemptionPlanner, Running, Scope
from ratchet_service.scheduling.queue_queries import CREATION_FAILED, Row
from ratchet_service.scheduling.slots import Board, Capacity, Grant, Need, Waiting, need_of, too_few_gpus

BATCH: Final = 16
"""Most launches in one transaction; as many again of launchers without slots."""
MAX_REASONS_STORED: Final = 1_000
"""Most jobs, of those whose need was not evaluated, for which one pass stores why they wait; later passes do the others."""
NO_SLOT: Final = "no-slot"
QUOTA: Final = "quota"


@dataclass(frozen=True)
class Preemption:
    """Whose jobs are stopped for those of higher priority; ``min_run_seconds``: seconds that a job stopped for that reason trains
    before it may be stopped for it again."""

    scope: Scope = "owner"
    min_run_seconds: float = 60.0


@dataclass(frozen=True)
class Turn:
    """A job that starts now. In a ``LaunchPass`` its row is locked."""

    job: Job
    spec: JobSpec
    resolved: Resolved
    grant: Grant


@dataclass(frozen=True)
class Plan:
    """Result of a dry run. ``starts``: the jobs to start, with their newest attempt, as far as the dry run can determine them,
    and the slots of each.

    ``examined``: all jobs up to the last one for which there is something to do, and those that count for their owners as if
    they came before it. Jobs that a quota holds back are left out if all such jobs of their owner already have that reason: they
    do not affect the order of the others. ``no_slot_jobs``: jobs that get the reason that no slot is left; if there are any, the
    jobs that reserve slots are in ``examined``, too.
    """

    starts: Mapping[tuple[str, int], Grant]
    examined: Sequence[str]
    no_slot_jobs: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.examined or self.no_slot_jobs)


class SchedulingPass:
    """Base class of scheduling passes. ``slots``: the launchers, and whether Ratchet manages their slots."""

    def __init__(self, session: Session, slots: Mapping[str, bool], capacity: Capacity, preemption: Preemption) -> None:
        self._session = session
        self._slots = slots
        self._capacity = capacity
        self._board = Board(capacity, queue_queries.active_grants(session))
        self._reserved: set[str] = set()
        self._planner = PreemptionPlanner(
            queue_queries.running_attempts(session, preemption.min_run_seconds), preemption.scope
        )
        self._examined: list[str] = []
        self._reasons_stored = 0

    def reserve(self, turn: Turn) -> None:
        """Reserve what the job was granted: it is not started now, but will be in a moment."""
        self._reserved.add(turn.job.id)

    def turns(self) -> Iterator[Turn]:
        """Yield the jobs to start, in order. By the end of the iteration, the reasons of the waiting jobs are stored."""
        rows = {row.queued.job: row for row in self._rows_to_examine()}
        started: Counter[bool] = Counter()
        unstarted: list[Row] = []
        for place in self._ordered_places(list(rows.values())):
            row = rows[place.queued.job]
            self._examined.append(row.queued.job)
            slots = self._slots[row.kind]
            gpus = too_few_gpus(place.queued.share.gpus, self._capacity) if slots else None
            if gpus is not None:
                self._set_wait_reason(row, reason=NO_SLOT, message=gpus)
            elif place.held_back_reason is not None:
                self._set_wait_reason(row, reason=QUOTA, message=place.held_back_reason)
            elif started[slots] >= BATCH or (slots and self._is_full(place.queued)):
                unstarted.append(row)
            else:
                turn = self._evaluate(row, slots)
                if turn is None:
                    continue
                yield turn
                if (
                    turn.job.phase is JobPhase.QUEUED and turn.job.id not in self._reserved
                ):  # it could not be launched: its slots are free for others
                    self._board.release(turn.grant)
                else:
                    started[slots] += 1
        if self._board.exhausted:
            self._store_no_slot([row for row in unstarted if self._slots[row.kind]])

    def _rows_to_examine(self) -> Iterator[Row]:
        """Yield the jobs to examine."""
        raise NotImplementedError

    def _load_queued(self, job_id: str) -> Job | None:
        """Return the job's row; None if it is no longer queued."""
        raise NotImplementedError

    def _set_wait_reason(self, row: Row, *, reason: str, message: str) -> None:
        """Store why a job waits whose need was not evaluated; only if the reason has changed."""
        if (row.reason, row.message) == (reason, message):
            self._reason_unchanged(row)
            return
        self._reasons_stored += 1
        if self._reasons_stored <= MAX_REASONS_STORED:
            self._store_reason(row, reason, message)

    def _reason_unchanged(self, row: Row) -> None:
        """The row has this reason already."""

    def _store_reason(self, row: Row, reason: str, message: str) -> None:
        raise NotImplementedError

    def _store_slot_wait(self, job: Job, message: str) -> None:
        """Store which slots a job waits for."""
        raise NotImplementedError

    def _handle_unreadable(self, job: Job, error: ValidationError) -> None:
        """Handle a spec that another version stored: it must not keep the rest of the queue from running."""
        raise NotImplementedError

    def _end_job(self, job: Job, decision: Decision) -> None:
        """End the job."""
        raise NotImplementedError

    def _preempt(self, job: Job, victims: Sequence[Running]) -> bool:
        """Stop ``victims`` for the job; return whether that was done."""
        raise NotImplementedError

    def _store_no_slot(self, unstarted: Sequence[Row]) -> None:
        """Store that no other job that needs a slot can start. ``unstarted``: those of them that were examined."""
        raise NotImplementedError

    def _no_slot_message(self) -> str:
        return f"waits for CPU slots: all {self._capacity.cpus} are in use or reserved for jobs ahead of it"

    def _ordered_places(self, rows: Sequence[Row]) -> list[Place]:
        """Return the jobs in order. A job for which this machine has too few GPUs comes last: nothing of its owner's quota is
        reserved for it."""
        gpus = len(self._capacity.gpus)
        hopeless = [row.queued for row in rows if self._slots[row.kind] and row.queued.share.gpus > gpus]
        ids = {queued.job for queued in hopeless}
        hopeful = (row.queued for row in rows if row.queued.job not in ids)
        places = order_queue(hopeful, queue_queries.held_by_owner(self._session), quotas.limits(self._session))
        unmade = {row.queued.job for row in rows if row.reason == CREATION_FAILED}
        places.sort(key=lambda place: place.queued.job in unmade)
        return places + [Place(queued) for queued in hopeless]

    def _is_full(self, queued: Queued) -> bool:
        """True if no job of this priority that needs a CPU slot can start or have slots freed for it. A job for which slots were
        freed before is evaluated anyway, to store whether they still are."""
        return queued.claimed_since is None and self._board.exhausted and not self._planner.can_help(queued.priority)

    def _evaluate(self, row: Row, slots: bool) -> Turn | None:
        """Return the job to start, with its slots; None: it does not start now."""
        job = self._load_queued(row.queued.job)
        if job is None:
            return None
        try:
            spec, resolved = JobSpec.model_validate(job.spec), Resolved.model_validate(job.resolved)
        except ValidationError as error:
            self._handle_unreadable(job, error)
            return None
        decision = decide(view_of(job, limits_of(spec)), now_in(self._session))
        if decision.action is Action.END:
            self._end_job(job, decision)
        elif decision.action is Action.LAUNCH:
            need = need_of(spec, resolved)
            answer = self._board.allocate(job.id, need) if slots else Grant()
            if isinstance(answer, Grant):
                return Turn(job, spec, resolved, answer)
            if job.reason == CREATION_FAILED:
                return None
            room = "; slots are being freed for it" if self._free_slots(job, need, answer) else ""
            self._store_slot_wait(job, answer.message + room)
        return None

    def _free_slots(self, job: Job, need: Need, waiting: Waiting) -> bool:
        """True if slots are being freed for the job, since now or before. Another job may have taken those that were freed
        before."""
        if waiting.shortfall is None:
            return False
        before = job.preempting_since is not None and self._planner.covers_shortfall(waiting.shortfall)
        victims = self._planner.choose_victims(job.owner, job.priority, need, waiting.shortfall)
        return (bool(victims) and self._preempt(job, victims)) or before


class LaunchPass(SchedulingPass):
    """The pass within the transaction that launches: carries out what ``plan`` found, as far as that still holds. Rows of jobs
    that start are locked; the reasons of waiting jobs are stored in their rows."""

    def __init__(
        self, session: Session, slots: Mapping[str, bool], capacity: Capacity, preemption: Preemption, plan: Plan
    ) -> None:
        super().__init__(session, slots, capacity, preemption)
        self._plan = plan

    def _rows_to_examine(self) -> Iterator[Row]:
        yield from queue_queries.jobs_by_id(
            self._session, now_in(self._session), list(self._slots), self._plan.examined
        )

    def _load_queued(self, job_id: str) -> Job | None:
        """Return the row, locked; None also if another transaction holds it: then a later pass starts the job."""
        query = sa.select(Job).where(Job.id == job_id, Job.phase == JobPhase.QUEUED).with_for_update(skip_locked=True)
        return self._session.scalar(query.execution_options(populate_existing=True))

    def _preempt(self, job: Job, victims: Sequence[Running]) -> bool:
        if not self._still_stoppable(job, victims):
            return False
        for one in victims:
            message = (
                f"stopped for job {job.id} of priority {job.priority}: it is queued again and continues from its "
                "checkpoint"
            )
            apply(
                self._session,
                one.job,
                Event.PREEMPT,
                expected_attempt=one.attempt,
                cause=Cause.HIGHER_PRIORITY,
                reason=Cause.HIGHER_PRIORITY.value,
                message=message,
                data={"for": job.id, "priority": job.priority},
            )
        job.preempting_since = now_in(self._session)
        return True

    def _still_stoppable(self, job: Job, victims: Sequence[Running]) -> bool:
        """Lock the victims' rows and check them: an agent's report or a stop request may have arrived since they were read. Then
        the next round decides. Rows that another transaction holds are not waited for: it may be waiting for a row that is locked
        here."""
        attempts = {one.job: one.attempt for one in victims}
        query = sa.select(Job).where(Job.id.in_(attempts)).with_for_update(skip_locked=True)
        rows = list(self._session.scalars(query.execution_options(populate_existing=True)))
        return len(rows) == len(attempts) and all(
            row.attempt == attempts[row.id]
            and row.phase in (JobPhase.STARTING, JobPhase.RUNNING)
            and row.desired is Desired.RUN
            and row.priority < job.priority
            for row in rows
        )

    def _store_reason(self, row: Row, reason: str, message: str) -> None:
        """Store the reason. Like progress, this does not change the version."""
        self._session.flush()
        told = sa.update(Job).where(Job.id == row.queued.job, Job.phase == JobPhase.QUEUED)
        values = told.values(reason=reason, message=message)
        self._session.execute(values.execution_options(synchronize_session=False))

    def _store_slot_wait(self, job: Job, message: str) -> None:
        store_wait_reason(job, NO_SLOT, message)

    def _handle_unreadable(self, job: Job, error: ValidationError) -> None:
        first = error.errors(include_url=False, include_input=False)[0]
        text = f"this version of Ratchet cannot read the stored spec: {first['msg']} at {first['loc']}; submit the job again"
        apply(self._session, job.id, Event.END_FAILED, reason="spec-unreadable", message=text)

    def _end_job(self, job: Job, decision: Decision) -> None:
        assert decision.event is not None
        apply(self._session, job.id, decision.event, reason=decision.reason, message=decision.message)

    def _store_no_slot(self, unstarted: Sequence[Row]) -> None:
        self._session.flush()
        kinds = [kind for kind, slots in self._slots.items() if slots]
        queue_queries.store_waiting_reason(
            self._session, self._plan.no_slot_jobs, kinds, reason=NO_SLOT, message=self._no_slot_message()
        )


def store_wait_reason(job: Job, reason: str, message: str) -> bool:
    """Store why the job waits. Return True, and write, only if that has changed. Like progress, this does not change the
    version."""
    if (job.reason, job.message) == (reason, message):
        return False
    job.reason, job.message = reason, message
    return True
