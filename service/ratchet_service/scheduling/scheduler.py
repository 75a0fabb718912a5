"""A scheduling pass over the queue: which jobs start, why others wait, which attempts are stopped. ``LaunchPass`` repeats in
the launching transaction what ``DryRunPass`` has found, so that the lock of the slots is held briefly."""

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
    """Settings of preemption. ``scope``: whose jobs may be stopped for one of higher priority. ``min_run_seconds``: how long a
    job that was stopped in this way trains before it may be stopped in this way again."""

    scope: Scope = "owner"
    min_run_seconds: float = 60.0


@dataclass(frozen=True)
class Turn:
    """A job that starts now, with its spec and its slots. In a ``LaunchPass`` its row is locked."""

    job: Job
    spec: JobSpec
    resolved: Resolved
    grant: Grant


@dataclass(frozen=True)
class Plan:
    """Result of a dry run, falsy if there is nothing to do. ``starts``: (job id, number of its newest attempt) -> slots.
    ``examined``: ids of the jobs that the launching pass must read. ``no_slot_jobs``: ids of jobs that get the reason
    ``NO_SLOT``."""

    starts: Mapping[tuple[str, int], Grant]
    examined: Sequence[str]
    no_slot_jobs: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.examined or self.no_slot_jobs)


class SchedulingPass:
    """Base class of scheduling passes: goes through the queue and determines which jobs start. Subclasses read the jobs and
    handle the results."""

    def __init__(self, session: Session, slots: Mapping[str, bool], capacity: Capacity, preemption: Preemption) -> None:
        """Read which slots are held, and the running attempts. ``slots``: this reconciler's launchers, by name; True: Ratchet
        manages their slots."""
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
        """Keep the slots of ``turn`` although its job does not start. Call it before the next item of ``turns``."""
        self._reserved.add(turn.job.id)

    def turns(self) -> Iterator[Turn]:
        """Yield the jobs to start, in order. The caller starts each job before it takes the next one; otherwise its slots are
        free again, unless ``reserve`` was called."""
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
        """Yield the queued jobs to examine, in any order."""
        raise NotImplementedError

    def _load_queued(self, job_id: str) -> Job | None:
        """Read the job's whole row; None: the job is no longer queued, or is skipped because its row is locked."""
        raise NotImplementedError

    def _set_wait_reason(self, row: Row, *, reason: str, message: str) -> None:
        """Have the reason stored why a job waits, if it is new; at most ``MAX_REASONS_STORED`` in a pass."""
        if (row.reason, row.message) == (reason, message):
            self._reason_unchanged(row)
            return
        self._reasons_stored += 1
        if self._reasons_stored <= MAX_REASONS_STORED:
            self._store_reason(row, reason, message)

    def _reason_unchanged(self, row: Row) -> None:
        """Called for a waiting job whose row already has the reason. Does nothing, unless a subclass overrides it."""

    def _store_reason(self, row: Row, reason: str, message: str) -> None:
        """Store the reason and its message in the row of a job that is not evaluated."""
        raise NotImplementedError

    def _store_slot_wait(self, job: Job, message: str) -> None:
        """Store that the job waits for slots; ``message`` says which."""
        raise NotImplementedError

    def _handle_unreadable(self, job: Job, error: ValidationError) -> None:
        """Handle a job whose stored spec or decisions cannot be validated; the rest of the queue must still run."""
        raise NotImplementedError

    def _end_job(self, job: Job, decision: Decision) -> None:
        """End a queued job that ``decide`` ends, as ``decision`` says."""
        raise NotImplementedError

    def _preempt(self, job: Job, victims: Sequence[Running]) -> bool:
        """Stop the attempts ``victims``, whose slots ``job`` needs. Return False if that was not possible: then none is
        stopped."""
        raise NotImplementedError

    def _store_no_slot(self, unstarted: Sequence[Row]) -> None:
        """Store the reason ``NO_SLOT`` for waiting jobs. ``unstarted``: those of them that this pass has examined."""
        raise NotImplementedError

    def _no_slot_message(self) -> str:
        """Return the message for a job that waits because no CPU slot is left."""
        return f"waits for CPU slots: all {self._capacity.cpus} are in use or reserved for jobs ahead of it"

    def _ordered_places(self, rows: Sequence[Row]) -> list[Place]:
        """Return all jobs of ``rows`` in the order of the pass: fair order, then jobs whose attempt could not be created, then
        those that need more GPUs than the machine has."""
        gpus = len(self._capacity.gpus)
        hopeless = [row.queued for row in rows if self._slots[row.kind] and row.queued.share.gpus > gpus]
        ids = {queued.job for queued in hopeless}
        hopeful = (row.queued for row in rows if row.queued.job not in ids)
        places = order_queue(hopeful, queue_queries.held_by_owner(self._session), quotas.limits(self._session))
        unmade = {row.queued.job for row in rows if row.reason == CREATION_FAILED}
        places.sort(key=lambda place: place.queued.job in unmade)
        # nothing of a quota is reserved for these
        return places + [Place(queued) for queued in hopeless]

    def _is_full(self, queued: Queued) -> bool:
        """True if the job need not be evaluated, since it can get no CPU slot."""
        # a job for which another was stopped is evaluated, to store whether slots are still being freed
        return queued.claimed_since is None and self._board.exhausted and not self._planner.can_help(queued.priority)

    def _evaluate(self, row: Row, slots: bool) -> Turn | None:
        """Return the job with its slots; None: it does not start now, and may get a reason, end, or have others stopped for it.
        ``slots``: Ratchet manages the slots of its launcher."""
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
        """Stop attempts of lower priority if that frees enough slots for the job. Return True if attempts are stopped for the job
        now. Return True also if attempts were stopped for it earlier, and the slots that they will free are still enough."""
        if waiting.shortfall is None:
            return False
        before = job.preempting_since is not None and self._planner.covers_shortfall(waiting.shortfall)
        victims = self._planner.choose_victims(job.owner, job.priority, need, waiting.shortfall)
        return (bool(victims) and self._preempt(job, victims)) or before


class LaunchPass(SchedulingPass):
    """The pass within the launching transaction: carries out what still holds of ``plan``. The rows that it changes are
    locked; the caller starts the jobs."""

    def __init__(
        self, session: Session, slots: Mapping[str, bool], capacity: Capacity, preemption: Preemption, plan: Plan
    ) -> None:
        super().__init__(session, slots, capacity, preemption)
        self._plan = plan

    def _rows_to_examine(self) -> Iterator[Row]:
        """Yield the jobs of the plan's ``examined`` that are still queued and in no back-off."""
        yield from queue_queries.jobs_by_id(
            self._session, now_in(self._session), list(self._slots), self._plan.examined
        )

    def _load_queued(self, job_id: str) -> Job | None:
        """Lock the job's row and return it; None: the job is no longer queued, or another transaction holds the row."""
        query = sa.select(Job).where(Job.id == job_id, Job.phase == JobPhase.QUEUED).with_for_update(skip_locked=True)
        return self._session.scalar(query.execution_options(populate_existing=True))

    def _preempt(self, job: Job, victims: Sequence[Running]) -> bool:
        """Request the stop of all ``victims`` for ``job``. Return False, without a change, if one may not be stopped now."""
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
        """Lock the victims' rows; True if all could be locked and may still be stopped for ``job``."""
        attempts = {one.job: one.attempt for one in victims}
        # no wait for a locked row: its transaction may wait for a row that is locked here
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
        """Store the reason in the job's row if the job is still queued. Its ETag does not change."""
        self._session.flush()
        told = sa.update(Job).where(Job.id == row.queued.job, Job.phase == JobPhase.QUEUED)
        values = told.values(reason=reason, message=message)
        self._session.execute(values.execution_options(synchronize_session=False))

    def _store_slot_wait(self, job: Job, message: str) -> None:
        """Set the reason in the job's row, which is locked."""
        store_wait_reason(job, NO_SLOT, message)

    def _handle_unreadable(self, job: Job, error: ValidationError) -> None:
        """End the job as failed, with a message that names the first validation error."""
        first = error.errors(include_url=False, include_input=False)[0]
        text = f"this version of Ratchet cannot read the stored spec: {first['msg']} at {first['loc']}; submit the job again"
        apply(self._session, job.id, Event.END_FAILED, reason="spec-unreadable", message=text)

    def _end_job(self, job: Job, decision: Decision) -> None:
        """Apply the event of ``decision`` to the job, in this transaction."""
        assert decision.event is not None
        apply(self._session, job.id, decision.event, reason=decision.reason, message=decision.message)

    def _store_no_slot(self, unstarted: Sequence[Row]) -> None:
        """Store the reason for the jobs of the plan's ``no_slot_jobs`` that still wait; ``unstarted`` is not used."""
        self._session.flush()
        kinds = [kind for kind, slots in self._slots.items() if slots]
        queue_queries.store_waiting_reason(
            self._session, self._plan.no_slot_jobs, kinds, reason=NO_SLOT, message=self._no_slot_message()
        )


def store_wait_reason(job: Job, reason: str, message: str) -> bool:
    """Set reason and message of the job; False if it has both already. Its ETag does not change."""
    if (job.reason, job.message) == (reason, message):
        return False
    job.reason, job.message = reason, message
    return True
