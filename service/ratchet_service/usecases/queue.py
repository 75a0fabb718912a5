"""The queue as the API shows it: in the launch order, with the reason recorded for each job, if any."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.queue import QueuedView, QueueView
from ratchet_contract.phases import JobPhase
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Job
from ratchet_service.db.queries import find_job
from ratchet_service.scheduling import queue_position, queue_queries
from ratchet_service.scheduling.fair_order import Queued
from ratchet_service.scheduling.queue_position import Standing
from ratchet_service.scheduling.scheduler import Row
from ratchet_service.usecases import pagination

MAX_POSITION: Final = 5_000
"""Greatest position that is computed for jobs of several owners: to compute one, all jobs ahead must be read."""
MAX_SINGLE_JOB_POSITION: Final = 1_000
"""Greatest position that is computed when a single job is read, which is frequent."""


def page(session: Session, limit: int, cursor: str | None) -> QueueView:
    """Return the next queued jobs in the launch order, up to ``MAX_POSITION``, without those in a back-off. ``cursor``: that
    of the page before. Raise ``Refused`` for a bad one."""
    digest, now = pagination.query_digest(of="queue"), now_in(session)
    (after,) = pagination.decode(cursor, digest, (int,)) or [0]
    after = min(max(0, after), MAX_POSITION)
    end = min(after + limit, MAX_POSITION)
    shown = list(islice(queue_position.iter_queue(session, now, end), after, end))
    end, waiting = after + len(shown), queue_position.queue_length(session, now)
    following = pagination.encode(digest, [end]) if shown and end < min(waiting, MAX_POSITION) else None
    views = _views(session, [(Standing(after + n, after + n - 1), row) for n, row in enumerate(shown, 1)])
    return QueueView(items=views, waiting=waiting, next_cursor=following)


def job_entry(session: Session, job_id: str) -> QueueView:
    """Return the queue with one job as its only item; without an item if it is not queued. Raise ``NotFound``."""
    job, now = find_job(session, job_id), now_in(session)
    waiting = queue_position.queue_length(session, now)
    if job.phase is not JobPhase.QUEUED:
        return QueueView(items=[], waiting=waiting)
    takes = queue_queries.job_share(job.spec.get("world"), job.resolved.get("device"))
    queued = Queued(job.id, job.owner, job.priority, job.created_at, takes)
    row = Row(queued, "", job.reason, job.message)
    return QueueView(
        items=_views(session, [(queue_position.find_position(session, now, job, MAX_POSITION), row)]), waiting=waiting
    )


def job_position(session: Session, job: Job) -> Standing:
    """Return the job's position in the queue, or only a lower bound. Both values are None for a job that is not queued, and for a
    job that is in a back-off."""
    return (
        queue_position.find_position(session, now_in(session), job, MAX_SINGLE_JOB_POSITION)
        if job.phase is JobPhase.QUEUED
        else Standing()
    )


def _views(session: Session, rows: Iterable[tuple[Standing, Row]]) -> list[QueuedView]:
    """Return the API's views of ``rows``, without jobs that were deleted after their rows were read."""
    places = list(rows)
    shown = sa.select(Job.id, Job.name).where(Job.id.in_([row.queued.job for _, row in places]))
    names = {job_id: name for job_id, name in session.execute(shown)}  # noqa: C416
    return [
        QueuedView(
            position=place.position,
            ahead_at_least=place.min_ahead,
            job_id=row.queued.job,
            name=names[row.queued.job],
            owner=row.queued.owner,
            priority=row.queued.priority,
            ranks=row.queued.share.ranks,
            gpus=row.queued.share.gpus,
            reason=row.reason,
            message=row.message,
            created_at=row.queued.created_at,
        )
        for place, row in places
        if row.queued.job in names
    ]
