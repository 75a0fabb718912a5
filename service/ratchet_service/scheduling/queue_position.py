"""Positions of queued jobs: by counting where that is enough, else by reading the queue in launch order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import JobPhase
from ratchet_service.db.models import Job
from ratchet_service.scheduling import queue_queries, quotas
from ratchet_service.scheduling.fair_order import Queued, iter_turns, line_key
from ratchet_service.scheduling.queue_queries import QUEUED
from ratchet_service.scheduling.scheduler import CREATION_FAILED, Row

_MIN_FIRST_ROWS: Final = 16
"""Fewest rows of one owner that are read at first."""


@dataclass(frozen=True)
class Standing:
    """A job's place in the queue. ``position``: counted from 1; None: not known. ``ahead``: how many jobs are ahead; only a lower
    bound if ``position`` is None. Both are None for a job that is in a back-off, and for a job that is not queued."""

    position: int | None = None
    ahead: int | None = None

    @property
    def min_ahead(self) -> int | None:
        """The lower bound of the number of jobs ahead, for a job without a position; else None."""
        return self.ahead if self.position is None else None


def find_position(session: Session, now: datetime, job: Job, max_depth: int) -> Standing:
    """Return the position of a job. Far back in the queue, there may be only a lower bound of the number of jobs ahead. For a job
    that is not queued or that is in a back-off, both values are None."""
    if session.scalar(sa.select(Job.id).where(Job.id == job.id, queue_queries.is_due(now))) is None:
        return Standing()
    if job.reason == CREATION_FAILED:
        last = len(queue_queries.creation_failed_jobs(session, now))
        made = max(0, queue_length(session, now) - last)
        return Standing(made + 1, made) if last == 1 else _walk_queue(session, now, job.id, max_depth, made)
    ahead, alone = _count_ahead(session, now, job)
    if alone:
        return Standing(ahead + 1, ahead)
    return Standing(None, ahead) if ahead >= max_depth else _walk_queue(session, now, job.id, max_depth, ahead)


def queue_length(session: Session, now: datetime) -> int:
    """Return the number of jobs that are queued and in no back-off."""
    return _count(session, queue_queries.is_due(now))


def _walk_queue(session: Session, now: datetime, job_id: str, max_depth: int, ahead: int) -> Standing:
    """Return the job's position if it is among the first ``max_depth`` jobs, else a lower bound of the number ahead of it.
    ``ahead``: how many are certainly ahead."""
    for n, row in enumerate(iter_queue(session, now, max_depth, ahead + 1), 1):
        if row.queued.job == job_id:
            return Standing(n, n - 1)
        if n >= max_depth:
            break
    return Standing(None, max(ahead, max_depth))


def iter_queue(session: Session, now: datetime, expected_rows: int, rows_per_owner: int | None = None) -> Iterator[Row]:
    """Yield the queued jobs without a back-off, of all launchers, in the launch order. ``expected_rows``: about how many jobs the
    caller will take. ``rows_per_owner``: about how many jobs of one owner it will take at most; None: not known. Both numbers
    only affect speed."""
    claims: dict[str, list[Row]] = {}
    for row in queue_queries.claiming_jobs(session, now):
        claims.setdefault(row.queued.owner, []).append(row)
    read: dict[str, Row] = {}
    rows = queue_queries.Lines(session, now, None)

    def line(owner: str, priorities: list[tuple[int, int]]) -> Iterator[Queued]:
        """Yield the owner's jobs in order, and keep the row of each in ``read``."""
        claiming = sorted(claims.get(owner, ()), key=lambda row: line_key(row.queued))
        ids = {row.queued.job for row in claiming}
        others = (row for row in rows.for_owner(owner, priorities, first) if row.queued.job not in ids)
        for row in merge(claiming, others, key=lambda row: line_key(row.queued)) if claiming else others:
            read[row.queued.job] = row
            yield row.queued

    owners = queue_queries.priorities_by_owner(session)
    share = expected_rows * 5 // 4 // max(1, len(owners))  # owners take turns, some a little more often than others
    first = max(_MIN_FIRST_ROWS, share if rows_per_owner is None else min(share, rows_per_owner))
    lines = {owner: line(owner, priorities) for owner, priorities in owners.items()}
    last = []
    for place in iter_turns(lines, queue_queries.held_by_owner(session), quotas.limits(session)):
        row = read.pop(place.queued.job)
        if row.reason == CREATION_FAILED:
            last.append(row)
        else:
            yield row
    yield from last


def _count_ahead(session: Session, now: datetime, job: Job) -> tuple[int, bool]:
    """Return how many jobs are certainly ahead of ``job``, and whether that is their exact number."""
    higher, others = 0, False
    for owner, priorities in queue_queries.priorities_by_owner(session).items():
        higher += sum(count for priority, count in priorities if priority > job.priority)
        others |= owner != job.owner and any(priority == job.priority for priority, _ in priorities)
    higher -= _count_not_in_line(session, now, Job.priority > job.priority)
    # Several statements: on PostgreSQL a job that backs off between two of them is subtracted without having been counted.
    return max(0, higher + _count_ahead_in_line(session, now, job)), not others


def _count_ahead_in_line(session: Session, now: datetime, job: Job) -> int:
    """Return how many jobs of the same owner and priority are ahead of ``job``."""
    rows = (row for row in queue_queries.claiming_jobs(session, now) if row.reason != CREATION_FAILED)
    claims = [row.queued for row in rows if (row.queued.owner, row.queued.priority) == (job.owner, job.priority)]
    own = next((one for one in claims if one.job == job.id), None)
    if own is not None:
        return sum(line_key(one) < line_key(own) for one in claims)
    earlier = (Job.created_at < job.created_at) | ((Job.created_at == job.created_at) & (Job.id < job.id))
    line = (Job.owner == job.owner) & (Job.priority == job.priority) & (Job.created_at <= job.created_at) & earlier
    passing = sum((one.created_at, one.job) > (job.created_at, job.id) for one in claims)
    return _count(session, (Job.phase == JobPhase.QUEUED) & line) - _count_not_in_line(session, now, line) + passing


def _count_not_in_line(session: Session, now: datetime, condition: sa.ColumnElement[bool]) -> int:
    """Return how many queued jobs that match ``condition`` have no place in their owner's line. These are jobs in a back-off, and
    jobs that come last because their attempt could not be created."""
    # both groups are usually small and indexed: ``condition`` only selects what is counted of them
    held = sa.and_(Job.phase == JobPhase.QUEUED, Job.not_before > now, ~queue_queries.is_due(now))
    last = sa.and_(QUEUED, Job.reason == CREATION_FAILED, queue_queries.is_due(now))
    counted = sa.select(sa.func.count(sa.case((condition, 1))))
    return sum(session.scalar(counted.where(absent)) or 0 for absent in (held, last))


def _count(session: Session, condition: sa.ColumnElement[bool]) -> int:
    """Return the number of jobs that match ``condition``."""
    return session.scalar(sa.select(sa.func.count()).select_from(Job).where(condition)) or 0
