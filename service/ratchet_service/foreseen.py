"""What a look at the queue would do, found in a session that only reads: no lock is held meanwhile, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.phases import JobPhase
from ratchet_service import queue_rows, quotas
from ratchet_service.clock import now_in
from ratchet_service.decision import Decision
from ratchet_service.models import Job
from ratchet_service.queue_order import Queued
from ratchet_service.queue_preemption import Running
from ratchet_service.queue_rows import UNMADE, Row
from ratchet_service.queueing import BATCH, NO_SLOT, QUOTA, Look, Plan, Preemption
from ratchet_service.slots import Capacity, Grant, too_few_gpus


class Foreseen(Look):
    """Over the first jobs of each owner, in order."""

    _upto = 0

    def __init__(
        self,
        session: Session,
        slots: Mapping[str, bool],
        capacity: Capacity,
        preemption: Preemption,
        tried: Collection[tuple[str, int]],
    ) -> None:
        """``tried``: jobs, each with its newest attempt, whose turn it was a moment ago, in vain."""
        super().__init__(session, slots, capacity, preemption)
        self._tried = tried

    def plan(self) -> Plan:
        """What is to be done now; false where that is nothing. What was true of a job may have changed by then."""
        self._rest: list[str] = []
        self._unmade: list[str] = []
        self._asked: list[str] = []
        self._held_back: dict[str, str] = {}
        self._owners_told: set[str] = set()
        starts: dict[tuple[str, int], Grant] = {}
        for turn in self.turns():
            key = (turn.job.id, turn.job.epoch)
            if key in self._tried:
                continue
            # What could not be made before may fail again, for ever: those behind it are tried in the same look, not never.
            if turn.job.reason != UNMADE or len(starts) >= BATCH:
                self.keep(turn)
            self._acts()
            starts[key] = turn.grant
        quiet = {job for job, owner in self._held_back.items() if owner not in self._owners_told}
        looked_at = dict.fromkeys(job for job in self._passed[: self._upto] if job not in quiet)
        if self._rest:  # nobody else can start because of what these keep
            looked_at |= dict.fromkeys(self._asked)
        if looked_at:  # their owners' later jobs have their turn as if these came before
            looked_at |= dict.fromkeys(self._unmade)
        return Plan(starts, list(looked_at), self._rest)

    def _acts(self) -> None:
        self._upto = len(self._passed)

    def _rows(self) -> Iterator[Row]:
        """Those that need slots and those that do not, each as far as is looked: neither hides the other."""
        for slots in (True, False):
            kinds = [kind for kind, needs in self._slots.items() if needs is slots]
            if kinds:
                for row in queue_rows.waiting(self._session, now_in(self._session), kinds, self._never(slots)):
                    if row.reason == UNMADE:
                        self._unmade.append(row.queued.job)
                    yield row

    def _never(self, slots: bool) -> Callable[[Queued], str | None]:
        """Why a job of launchers with or without ``slots`` cannot start as the machine and its owner's quota are now."""
        limit = quotas.limits(self._session)

        def why(queued: Queued) -> str | None:
            gpus = too_few_gpus(queued.takes.gpus, self._capacity) if slots else None
            return gpus or limit(queued.owner).too_small(queued.takes)

        return why

    def _queued(self, job_id: str) -> Job | None:
        self._asked.append(job_id)
        return self._session.scalar(sa.select(Job).where(Job.id == job_id, Job.phase == JobPhase.QUEUED))

    def _knows(self, row: Row) -> None:
        if row.reason == QUOTA:
            self._held_back[row.queued.job] = row.queued.owner

    def _tell(self, row: Row, reason: str, message: str) -> None:
        self._owners_told.add(row.queued.owner)
        self._acts()

    def _told(self, job: Job, message: str) -> None:
        if (job.reason, job.message) != (NO_SLOT, message):
            self._acts()

    def _unreadable(self, job: Job, error: ValidationError) -> None:
        self._acts()

    def _give_up(self, job: Job, decision: Decision) -> None:
        self._acts()

    def _stop(self, job: Job, victims: Sequence[Running]) -> bool:
        self._acts()
        return True

    def _tell_the_rest(self, left: Sequence[Row]) -> None:
        kinds = [kind for kind, slots in self._slots.items() if slots]
        told = set(self._passed).difference(row.queued.job for row in left)
        untold = queue_rows.untold(self._session, now_in(self._session), kinds, [NO_SLOT, QUOTA, UNMADE])
        self._rest = [row.queued.job for row in left if row.reason == QUOTA]
        self._rest += [job_id for job_id in untold if job_id not in told]
