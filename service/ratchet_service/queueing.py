"""One look at the queue, within the transaction that launches: whose turn it is, why the others wait, who makes room.

``queue_order`` says in which order, ``slots`` what is free, ``queue_preemption`` who is stopped for whom; this carries it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class Round:
    """``slots``: the launchers, and whether Ratchet keeps their slots."""

    def __init__(self, session: Session, slots: Mapping[str, bool], capacity: Capacity, preemption: Preemption) -> None:
        self._session = session
        self._slots = slots
        self._capacity = capacity
        self._board = Board(capacity, queue_rows.grants(session))
        self._kept: set[str] = set()
        self._room = Room(queue_rows.running(session, preemption.min_run), preemption.scope)

    def keep(self, turn: Turn) -> None:
        """It is not started now, and will be in a moment: nobody else gets what it was given."""
        self._kept.add(turn.job.id)

    def turns(self) -> Iterator[Turn]:
        """Jobs to start, in order. Those that wait are told why, in their rows, once the iteration ends."""
        rows = {row.queued.job: row for row in self._rows()}
        given: Counter[bool] = Counter()
        left: list[Row] = []
        for place in self._places(list(rows.values())):
            row = rows[place.queued.job]
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
        """Those that need slots and those that do not, each as far as is looked: neither hides the other."""
        for slots in (True, False):
            kinds = [kind for kind, needs in self._slots.items() if needs is slots]
            if kinds:
                yield from queue_rows.waiting(self._session, now_in(self._session), kinds, self._never(slots))

    def _never(self, slots: bool) -> Callable[[Queued], str | None]:
        """Why a job of launchers with or without ``slots`` cannot start as the machine and its owner's quota are now."""
        limit = quotas.limits(self._session)

        def why(queued: Queued) -> str | None:
            gpus = too_few_gpus(queued.takes.gpus, self._capacity) if slots else None
            return gpus or limit(queued.owner).too_small(queued.takes)

        return why

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
        """None: it does not start now, and its row says why."""
        job = _hold_queued(self._session, row.queued.job)
        if job is None:
            return None
        try:
            spec, resolved = JobSpec.model_validate(job.spec), Resolved.model_validate(job.resolved)
        except ValidationError as error:
            _unreadable(self._session, job, error)
            return None
        decision = decide(view_of(job, limits_of(spec)), now_in(self._session))
        if decision.action is Action.END:
            _give_up(self._session, job, decision)
        elif decision.action is Action.LAUNCH:
            need = need_of(spec, resolved)
            answer = self._board.ask(job.id, need) if slots else Grant()
            if isinstance(answer, Grant):
                return Turn(job, spec, resolved, answer)
            if job.reason == UNMADE:
                return None
            room = "; room is made for it" if self._make_room(job, need, answer) else ""
            say_why(job, NO_SLOT, answer.message + room)
        return None

    def _make_room(self, job: Job, need: Need, waiting: Waiting) -> bool:
        """Whether room is being made for it, since now or before; what was made before another job may have taken."""
        if waiting.lacks is None:
            return False
        before = job.room_since is not None and self._room.coming(waiting.lacks)
        victims = self._room.make(job.owner, job.priority, need, waiting.lacks)
        if not victims or not self._still_stoppable(job, victims):
            return before
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

    def _say(self, row: Row, *, reason: str, message: str) -> None:
        """Progress of a kind, so the version stays; written only when it changes."""
        if (row.reason, row.message) == (reason, message):
            return
        self._session.flush()
        told = sa.update(Job).where(Job.id == row.queued.job, Job.phase == JobPhase.QUEUED)
        values = told.values(reason=reason, message=message)
        self._session.execute(values.execution_options(synchronize_session=False))

    def _tell_the_rest(self, left: Sequence[Row]) -> None:
        """Nobody else who needs a slot can start: say so in one statement, to those that have not heard it."""
        text = f"waits for CPU slots: all {self._capacity.cpus} are taken, or kept for jobs ahead of it"
        for row in left:
            if row.reason == QUOTA:
                self._say(row, reason=NO_SLOT, message=text)
        kinds = [kind for kind, slots in self._slots.items() if slots]
        others = sa.update(Job).where(
            queue_rows.due(now_in(self._session)),
            sa.or_(Job.reason.is_(None), Job.reason.not_in([NO_SLOT, QUOTA, UNMADE])),
            queue_rows.launcher_kind().in_(kinds),
        )
        self._session.flush()
        told = others.values(reason=NO_SLOT, message=text)
        self._session.execute(told.execution_options(synchronize_session=False))


def say_why(job: Job, reason: str, message: str) -> bool:
    """Progress of a kind, so the version stays; written, and True, only when it changes."""
    if (job.reason, job.message) == (reason, message):
        return False
    job.reason, job.message = reason, message
    return True


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
