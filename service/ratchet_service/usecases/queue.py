"""The queue as it is shown: in the order in which the reconciler goes through it, with what it said of each job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api_queue import QueuedView, QueueView
from ratchet_contract.phases import JobPhase
from ratchet_service import cursors, queue_rows, quotas
from ratchet_service.clock import now_in
from ratchet_service.models import Job
from ratchet_service.queue_order import Queued, in_order
from ratchet_service.queue_rows import LOOK, UNMADE, Row
from ratchet_service.usecases.queries import find_job

DEEPEST: Final = 10_000
"""Positions are told up to here; who is further behind has none yet."""


def page(session: Session, limit: int, cursor: str | None) -> QueueView:
    """``limit`` jobs that no back-off holds, from where the page before ended. Positions shift as jobs start and come."""
    digest = cursors.query_digest(of="queue")
    (after,) = cursors.decode(cursor, digest, (int,)) or [0]
    after = min(max(0, after), DEEPEST)
    places = _places(session, after + limit)
    shown = places[after : min(after + limit, DEEPEST)]
    end = after + len(shown)
    waiting = session.scalar(sa.select(sa.func.count()).select_from(Job).where(queue_rows.due(now_in(session)))) or 0
    following = cursors.encode(digest, [end]) if shown and end < min(waiting, DEEPEST) else None
    views = _views(session, [(after + n, row) for n, row in enumerate(shown, 1)])
    return QueueView(items=views, waiting=waiting, next_cursor=following)


def of_job(session: Session, job_id: str) -> QueueView:
    """Where one job stands, and what it waits for; no item where it is not queued. Raises ``NotFound``."""
    job = find_job(session, job_id)
    waiting = session.scalar(sa.select(sa.func.count()).select_from(Job).where(queue_rows.due(now_in(session)))) or 0
    if job.phase is not JobPhase.QUEUED:
        return QueueView(items=[], waiting=waiting)
    found = _place(session, job_id, waiting)
    if found is not None:
        return QueueView(items=_views(session, [found]), waiting=waiting)
    takes = queue_rows.share(job.spec.get("world"), job.resolved.get("device"))
    queued = Queued(job.id, job.owner, job.priority, job.created_at, takes)
    return QueueView(items=_views(session, [(None, Row(queued, "", job.reason, job.message))]), waiting=waiting)


def _place(session: Session, job_id: str, waiting: int) -> tuple[int, Row] | None:
    """None: a back-off holds it, or it is behind ``DEEPEST``. First the first ones are looked at: to read far into a long queue
    of many owners takes seconds."""
    held = sa.select(Job.id).where(Job.id == job_id, queue_rows.due(now_in(session)))
    deep = 0 if session.scalar(held) is None else min(LOOK, DEEPEST)
    while deep:
        for n, row in enumerate(_places(session, deep)[:deep], 1):
            if row.queued.job == job_id:
                return n, row
        deep = 0 if deep >= min(waiting, DEEPEST) else min(10 * deep, DEEPEST)
    return None


def _places(session: Session, deep: int) -> list[Row]:
    """Of each owner so many are looked at as are asked for, and no fewer than the reconciler looks at: the first ``deep`` stand
    where they are told to."""
    rows = {row.queued.job: row for row in queue_rows.waiting(session, now_in(session), look=max(LOOK, deep))}
    places = in_order((row.queued for row in rows.values()), queue_rows.held(session), quotas.limits(session))
    return sorted((rows[place.queued.job] for place in places), key=lambda row: row.reason == UNMADE)


def _views(session: Session, rows: Iterable[tuple[int | None, Row]]) -> list[QueuedView]:
    places = list(rows)
    shown = sa.select(Job.id, Job.name).where(Job.id.in_([row.queued.job for _, row in places]))
    names = {job_id: name for job_id, name in session.execute(shown)}  # noqa: C416
    return [
        QueuedView(
            position=position,
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
        for position, row in places
    ]
