"""Dry run of a scheduling pass, in a session that only reads and holds no lock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.phases import JobPhase
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Job
from ratchet_service.lifecycle.decision import Decision
from ratchet_service.scheduling import queue_queries, quotas
from ratchet_service.scheduling.fair_order import Queued
from ratchet_service.scheduling.preemption import Running
from ratchet_service.scheduling.queue_queries import CREATION_FAILED, Row
from ratchet_service.scheduling.scheduler import BATCH, NO_SLOT, QUOTA, Plan, Preemption, SchedulingPass
from ratchet_service.scheduling.slots import Capacity, Grant, too_few_gpus


class DryRunPass(SchedulingPass):
    """Dry run of a scheduling pass over some jobs (``queue_queries.startable_jobs``). Changes nothing in the database."""

    _action_upto = 0

    def __init__(
        self,
        session: Session,
        slots: Mapping[str, bool],
        capacity: Capacity,
        preemption: Preemption,
        tried: Collection[tuple[str, int]],
    ) -> None:
        """Read which slots are held, and the running attempts. ``tried``: (job id, newest attempt) of jobs that are not to be
        planned again."""
        super().__init__(session, slots, capacity, preemption)
        self._tried = tried

    def plan(self) -> Plan:
        """Run the pass, once per object, and return what is to be done; falsy if that is nothing."""
        self._no_slot_jobs: list[str] = []
        self._creation_failed: list[str] = []
        self._loaded: list[str] = []
        self._held_back: dict[str, str] = {}
        self._owners_with_changes: set[str] = set()
        starts: dict[tuple[str, int], Grant] = {}
        for turn in self.turns():
            key = (turn.job.id, turn.job.attempt)
            if key in self._tried:
                continue
            # An attempt that could not be created may fail again, forever: the same pass also tries the jobs after it.
            if turn.job.reason != CREATION_FAILED or len(starts) >= BATCH:
                self.reserve(turn)
            self._mark_action()
            starts[key] = turn.grant
        quiet = {job for job, owner in self._held_back.items() if owner not in self._owners_with_changes}
        looked_at = dict.fromkeys(job for job in self._examined[: self._action_upto] if job not in quiet)
        if self._no_slot_jobs:  # no other job can start because of what these reserve
            looked_at |= dict.fromkeys(self._loaded)
        if looked_at:  # for their owners' later jobs, these count as if they came first
            looked_at |= dict.fromkeys(self._creation_failed)
        return Plan(starts, list(looked_at), self._no_slot_jobs)

    def _mark_action(self) -> None:
        """Record that there is something to do for the job examined last, so that the plan includes it."""
        self._action_upto = len(self._examined)

    def _rows_to_examine(self) -> Iterator[Row]:
        """Yield the jobs of launchers with slots, then those of launchers without; neither group hides jobs of the other."""
        for slots in (True, False):
            kinds = [kind for kind, needs in self._slots.items() if needs is slots]
            if kinds:
                for row in queue_queries.startable_jobs(
                    self._session, now_in(self._session), kinds, self._never_reason(slots)
                ):
                    if row.reason == CREATION_FAILED:
                        self._creation_failed.append(row.queued.job)
                    yield row

    def _never_reason(self, slots: bool) -> Callable[[Queued], str | None]:
        """Return a function that returns why a job can never start; None: it can. ``slots``: this machine's GPUs count, too."""
        limit = quotas.limits(self._session)

        def why(queued: Queued) -> str | None:
            gpus = too_few_gpus(queued.share.gpus, self._capacity) if slots else None
            return gpus or limit(queued.owner).never_fits_reason(queued.share)

        return why

    def _load_queued(self, job_id: str) -> Job | None:
        """Return the job's row, not locked; None if the job is no longer queued. Record that the job was loaded."""
        self._loaded.append(job_id)
        return self._session.scalar(sa.select(Job).where(Job.id == job_id, Job.phase == JobPhase.QUEUED))

    def _reason_unchanged(self, row: Row) -> None:
        """Record that the owner's quota holds the job back, if that is the reason that its row has."""
        if row.reason == QUOTA:
            self._held_back[row.queued.job] = row.queued.owner

    def _store_reason(self, row: Row, reason: str, message: str) -> None:
        """Record that the reason must be stored; write nothing."""
        self._owners_with_changes.add(row.queued.owner)
        self._mark_action()

    def _store_slot_wait(self, job: Job, message: str) -> None:
        """Record that there is something to do if the job's row does not have this reason and message yet."""
        if (job.reason, job.message) != (NO_SLOT, message):
            self._mark_action()

    def _handle_unreadable(self, job: Job, error: ValidationError) -> None:
        """Record that the job must be ended; write nothing."""
        self._mark_action()

    def _end_job(self, job: Job, decision: Decision) -> None:
        """Record that the job must be ended; write nothing."""
        self._mark_action()

    def _preempt(self, job: Job, victims: Sequence[Running]) -> bool:
        """Record that attempts must be stopped, and return True; nothing is stopped."""
        self._mark_action()
        return True

    def _store_no_slot(self, unstarted: Sequence[Row]) -> None:
        """Collect in ``_no_slot_jobs`` the ids of the jobs whose row must get the reason that no slot is left."""
        kinds = [kind for kind, slots in self._slots.items() if slots]
        examined = set(self._examined).difference(row.queued.job for row in unstarted)
        untold = queue_queries.ids_without_reason(
            self._session, now_in(self._session), kinds, [NO_SLOT, QUOTA, CREATION_FAILED]
        )
        self._no_slot_jobs = [row.queued.job for row in unstarted if row.reason == QUOTA]
        self._no_slot_jobs += [job_id for job_id in untold if job_id not in examined]
