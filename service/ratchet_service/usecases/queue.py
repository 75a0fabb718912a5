"""The queue as it is shown: in the order in which the reconciler goes through it, with what it said of each job."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api_queue import QueuedView, QueueView
from ratchet_contract.phases import JobPhase
from ratchet_service import cursors, queue_line, queue_rows
from ratchet_service.clock import now_in
from ratchet_service.models import Job
from ratchet_service.queue_line import Standing
from ratchet_service.queue_order import Queued
from ratchet_service.queue_rows import Row
from ratchet_service.usecases.queries import find_job

DEEPEST: Final = 5_000
"""Of several owners' jobs so many have a position: each is told by reading all that are ahead of it."""
NEAR: Final = 1_000
"""Likewise where a job is read: that is done often."""


def page(session: Session, limit: int, cursor: str | None) -> QueueView:
    """``limit`` jobs that no back-off holds, from where the page before ended. Positions shift as jobs start and come."""
    digest, now = cursors.query_digest(of="queue"), now_in(session)
    (after,) = cursors.decode(cursor, digest, (int,)) or [0]
    after = min(max(0, after), DEEPEST)
    end = min(after + limit, DEEPEST)
    shown = list(islice(queue_line.everybody(session, now, end), after, end))
    end, waiting = after + len(shown), queue_line.waiting(session, now)
    following = cursors.encode(digest, [end]) if shown and end < min(waiting, DEEPEST) else None
    views = _views(session, [(Standing(after + n, after + n - 1), row) for n, row in enumerate(shown, 1)])
    return QueueView(items=views, waiting=waiting, next_cursor=following)


def of_job(session: Session, job_id: str) -> QueueView:
    """Where one job stands, and what it waits for; no item where it is not queued. Raises ``NotFound``."""
    job, now = find_job(session, job_id), now_in(session)
    waiting = queue_line.waiting(session, now)
    if job.phase is not JobPhase.QUEUED:
        return QueueView(items=[], waiting=waiting)
    takes = queue_rows.share(job.spec.get("world"), job.resolved.get("device"))
    queued = Queued(job.id, job.owner, job.priority, job.created_at, takes)
    row = Row(queued, "", job.reason, job.message)
    return QueueView(items=_views(session, [(queue_line.standing(session, now, job, DEEPEST), row)]), waiting=waiting)


def place(session: Session, job: Job) -> Standing:
    """Of a job that is read; of one that is not queued nothing."""
    return queue_line.standing(session, now_in(session), job, NEAR) if job.phase is JobPhase.QUEUED else Standing()


def _views(session: Session, rows: Iterable[tuple[Standing, Row]]) -> list[QueuedView]:
    """Without those that have been deleted since their rows were read, as PostgreSQL tells."""
    places = list(rows)
    shown = sa.select(Job.id, Job.name).where(Job.id.in_([row.queued.job for _, row in places]))
    names = {job_id: name for job_id, name in session.execute(shown)}  # noqa: C416
    return [
        QueuedView(
            position=place.position,
            ahead_at_least=place.at_least,
            job_id=row.queued.job,
            name=names[row.queued.job],
            owner=row.queued.owner,
            priority=row.queued.priority,
            ranks=row.queued.takes.ranks,
            gpus=row.queued.takes.gpus,
            reason=row.reason,
            message=row.message,
            created_at=row.queued.created_at,
        )
        for place, row in places
        if row.queued.job in names
    ]
