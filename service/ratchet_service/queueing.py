"""A look at the queue: whose turn it is, why the others wait, who makes room.

``queue_order`` says in which order, ``slots`` what is free, ``queue_preemption`` who is stopped for whom. ``Foreseen`` looks in a
session that only reads, at all that a look takes in; ``Round`` looks again, within the transaction that launches, at those whom
that concerns, and carries it out. So the lock under which slots are lent is held for a moment, however long the queue is.
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
from ratchet_contract.spec import JobSpec, Resolved
from ratchet_service import queue_rows, quotas
from ratchet_service.clock import now_in
from ratchet_service.decide import decide
from ratchet_service.decision import Action, Decision
from ratchet_service.decision_rows import limits_of, view_of
from ratchet_service.models import Job
from ratchet_service.queue_order import Place, Queued, in_order
from ratchet_service.queue_preemption import Room, Running, Scope
from ratchet_service.queue_rows import UNMADE, Row
from ratchet_service.slots import Board, Capacity, Grant, Need, Waiting, need_of, too_few_gpus
from ratchet_service.transitions import apply

BATCH: Final = 16
"""Launches in one transaction; as many again of launchers without slots."""
SAID: Final = 1_000
"""Jobs that are told in one look why they wait, of those that were not asked for what they need; the others in the next ones."""
NO_SLOT: Final = "no-slot"
QUOTA: Final = "quota"


@dataclass(frozen=True)
class Preemption:
    """Whose jobs are stopped for those of higher priority; ``min_run``: seconds that one which was stopped so trains before it
    is stopped so again."""

    scope: Scope = "owner"
    min_run: float = 60.0


@dataclass(frozen=True)
class Turn:
    """A job that starts now, its row held."""

    job: Job
    spec: JobSpec
    resolved: Resolved
    grant: Grant


@dataclass(frozen=True)
class Plan:
    """What a look at the queue found to do. ``starts``: jobs with their newest attempt, as far as that could be told, and what
    each is given.

    ``looked_at``: all that come before the last one whom something concerns, and those that count with their owners as if they
    did; without those that a quota holds back, where all of their owner's know it: they have no part in the others' order.
    ``rest``: who is to be told that nobody else can start; then those that keep slots are looked at, too."""

    starts: Mapping[tuple[str, int], Grant]
    looked_at: Sequence[str]
    rest: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.looked_at or self.rest)


class Look:
    """``slots``: the launchers, and whether Ratchet keeps their slots."""

    def __init__(self, session: Session, slots: Mapping[str, bool], capacity: Capacity, preemption: Preemption) -> None:
        self._session = session
        self._slots = slots
        self._capacity = capacity
        self._board = Board(capacity, queue_rows.grants(session))
        self._kept: set[str] = set()
        self._room = Room(queue_rows.running(session, preemption.min_run), preemption.scope)
        self._passed: list[str] = []
        self._said = 0

    def keep(self, turn: Turn) -> None:
        """It is not started now, and will be in a moment: nobody else gets what it was given."""
        self._kept.add(turn.job.id)

    def turns(self) -> Iterator[Turn]:
        """Jobs to start, in order. Those that wait are told why once the iteration ends."""
        rows = {row.queued.job: row for row in self._rows()}
        given: Counter[bool] = Counter()
        left: list[Row] = []
        for place in self._places(list(rows.values())):
            row = rows[place.queued.job]
            self._passed.append(row.queued.job)
            slots = self._slots[row.kind]
            gpus = too_few_gpus(place.queued.takes.gpus, self._capacity) if slots else None
            if gpus is not None:
                self._say(row, reason=NO_SLOT, message=gpus)
            elif place.over is not None:
                self._say(row, reason=QUOTA, message=place.over)
            elif given[slots] >= BATCH or (slots and self._full(place.queued)):
                left.append(row)
            else:
                turn = self._turn(row, slots)
                if turn is None:
                    continue
                yield turn
                if (
                    turn.job.phase is JobPhase.QUEUED and turn.job.id not in self._kept
                ):  # it could not be launched: nobody waits for what it was given
                    self._board.take_back(turn.grant)
                else:
                    given[slots] += 1
        if self._board.exhausted:
            self._tell_the_rest([row for row in left if self._slots[row.kind]])

    def _rows(self) -> Iterator[Row]:
        """Those that are looked at."""
        raise NotImplementedError

    def _queued(self, job_id: str) -> Job | None:
        """The job's row; None if it is not queued any more."""
        raise NotImplementedError

    def _say(self, row: Row, *, reason: str, message: str) -> None:
        """Why a job waits that was not asked for what it needs; told only when it changes."""
        if (row.reason, row.message) == (reason, message):
            self._knows(row)
            return
        self._said += 1
        if self._said <= SAID:
            self._tell(row, reason, message)

    def _knows(self, row: Row) -> None:
        """It was told so before."""

    def _tell(self, row: Row, reason: str, message: str) -> None:
        raise NotImplementedError

    def _told(self, job: Job, message: str) -> None:
        """Which slots a job waits for."""
        raise NotImplementedError

    def _unreadable(self, job: Job, error: ValidationError) -> None:
        """A spec stored by another version must not keep the rest of the queue from running."""
        raise NotImplementedError

    def _give_up(self, job: Job, decision: Decision) -> None:
        """The job ends here."""
        raise NotImplementedError

    def _stop(self, job: Job, victims: Sequence[Running]) -> bool:
        """Whether these are stopped for the job."""
        raise NotImplementedError

    def _tell_the_rest(self, left: Sequence[Row]) -> None:
        """Nobody else who needs a slot can start. ``left``: those that were looked at."""
        raise NotImplementedError

    def _no_slot(self) -> str:
        return f"waits for CPU slots: all {self._capacity.cpus} are taken, or kept for jobs ahead of it"

    def _places(self, rows: Sequence[Row]) -> list[Place]:
        """A job that this machine has not enough GPUs for comes last: it keeps nothing of its owner's quota from others."""
        gpus = len(self._capacity.gpus)
        hopeless = [row.queued for row in rows if self._slots[row.kind] and row.queued.takes.gpus > gpus]
        ids = {queued.job for queued in hopeless}
        hopeful = (row.queued for row in rows if row.queued.job not in ids)
        places = in_order(hopeful, queue_rows.held(self._session), quotas.limits(self._session))
        unmade = {row.queued.job for row in rows if row.reason == UNMADE}
        places.sort(key=lambda place: place.queued.job in unmade)
        return places + [Place(queued) for queued in hopeless]

    def _full(self, queued: Queued) -> bool:
        """Nobody of its priority who needs a CPU slot can start, nor have room made. For whom room was made before is
        told whether it still is."""
        return queued.claims is None and self._board.exhausted and not self._room.helps(queued.priority)

    def _turn(self, row: Row, slots: bool) -> Turn | None:
        """None: it does not start now."""
        job = self._queued(row.queued.job)
        if job is None:
            return None
        try:
            spec, resolved = JobSpec.model_validate(job.spec), Resolved.model_validate(job.resolved)
        except ValidationError as error:
            self._unreadable(job, error)
            return None
        decision = decide(view_of(job, limits_of(spec)), now_in(self._session))
        if decision.action is Action.END:
            self._give_up(job, decision)
        elif decision.action is Action.LAUNCH:
            need = need_of(spec, resolved)
            answer = self._board.ask(job.id, need) if slots else Grant()
            if isinstance(answer, Grant):
                return Turn(job, spec, resolved, answer)
            if job.reason == UNMADE:
                return None
            room = "; room is made for it" if self._make_room(job, need, answer) else ""
            self._told(job, answer.message + room)
        return None

    def _make_room(self, job: Job, need: Need, waiting: Waiting) -> bool:
        """Whether room is being made for it, since now or before; what was made before another job may have taken."""
        if waiting.lacks is None:
            return False
        before = job.room_since is not None and self._room.coming(waiting.lacks)
        victims = self._room.make(job.owner, job.priority, need, waiting.lacks)
        return (bool(victims) and self._stop(job, victims)) or before


class Round(Look):
    """Within the transaction that launches: what ``plan`` found to do, as it is now. Rows are held; those that wait are told
    why in theirs."""

    def __init__(
        self, session: Session, slots: Mapping[str, bool], capacity: Capacity, preemption: Preemption, plan: Plan
    ) -> None:
        super().__init__(session, slots, capacity, preemption)
        self._plan = plan

    def _rows(self) -> Iterator[Row]:
        yield from queue_rows.these(self._session, now_in(self._session), list(self._slots), self._plan.looked_at)

    def _queued(self, job_id: str) -> Job | None:
        """Held; None also if somebody holds it now: then its turn comes again."""
        query = sa.select(Job).where(Job.id == job_id, Job.phase == JobPhase.QUEUED).with_for_update(skip_locked=True)
        return self._session.scalar(query.execution_options(populate_existing=True))

    def _stop(self, job: Job, victims: Sequence[Running]) -> bool:
        if not self._still_stoppable(job, victims):
            return False
        for one in victims:
            message = f"stopped for job {job.id} of priority {job.priority}: it is queued again, and goes on from its checkpoint"
            apply(
                self._session,
                one.job,
                Event.PREEMPT,
                expected_epoch=one.epoch,
                cause=Cause.HIGHER_PRIORITY,
                reason=Cause.HIGHER_PRIORITY.value,
                message=message,
                data={"for": job.id, "priority": job.priority},
            )
        job.room_since = now_in(self._session)
        return True

    def _still_stoppable(self, job: Job, victims: Sequence[Running]) -> bool:
        """Their rows, held: an agent's report or somebody's wish may have come since they were read. Then the next round sees.
        Nor is one waited for that somebody holds, who may be waiting for a row that is held here."""
        epochs = {one.job: one.epoch for one in victims}
        query = sa.select(Job).where(Job.id.in_(epochs)).with_for_update(skip_locked=True)
        rows = list(self._session.scalars(query.execution_options(populate_existing=True)))
        return len(rows) == len(epochs) and all(
            row.epoch == epochs[row.id]
            and row.phase in (JobPhase.STARTING, JobPhase.RUNNING)
            and row.desired is Desired.RUN
            and row.priority < job.priority
            for row in rows
        )

    def _tell(self, row: Row, reason: str, message: str) -> None:
        """Progress of a kind, so the version stays."""
        self._session.flush()
        told = sa.update(Job).where(Job.id == row.queued.job, Job.phase == JobPhase.QUEUED)
        values = told.values(reason=reason, message=message)
        self._session.execute(values.execution_options(synchronize_session=False))

    def _told(self, job: Job, message: str) -> None:
        say_why(job, NO_SLOT, message)

    def _unreadable(self, job: Job, error: ValidationError) -> None:
        first = error.errors(include_url=False, include_input=False)[0]
        text = f"this version of Ratchet cannot read the stored spec: {first['msg']} at {first['loc']}; submit the job again"
        apply(self._session, job.id, Event.END_FAILED, reason="spec-unreadable", message=text)

    def _give_up(self, job: Job, decision: Decision) -> None:
        assert decision.event is not None
        apply(self._session, job.id, decision.event, reason=decision.reason, message=decision.message)

    def _tell_the_rest(self, left: Sequence[Row]) -> None:
        self._session.flush()
        kinds = [kind for kind, slots in self._slots.items() if slots]
        queue_rows.tell(self._session, self._plan.rest, kinds, reason=NO_SLOT, message=self._no_slot())


def say_why(job: Job, reason: str, message: str) -> bool:
    """Progress of a kind, so the version stays; written, and True, only when it changes."""
    if (job.reason, job.message) == (reason, message):
        return False
    job.reason, job.message = reason, message
    return True
