"""The queue as it is shown: in the order in which the reconciler goes through it, with what it said of each job."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api import Page
from ratchet_contract.api_queue import QueuedView
from ratchet_service import queue_rows, quotas
from ratchet_service.clock import now_in
from ratchet_service.models import Job
from ratchet_service.queue_order import in_order


def first(session: Session, limit: int) -> Page[QueuedView]:
    """The first ``limit`` jobs that no back-off holds. Of each owner as many are looked at as the reconciler looks at."""
    rows = {row.queued.job: row for row in queue_rows.waiting(session, now_in(session))}
    places = in_order((row.queued for row in rows.values()), queue_rows.held(session), quotas.limits(session))[:limit]
    shown = sa.select(Job.id, Job.name).where(Job.id.in_([place.queued.job for place in places]))
    names = {job_id: name for job_id, name in session.execute(shown)}  # noqa: C416
    items = []
    for position, place in enumerate(places, 1):
        one, row = place.queued, rows[place.queued.job]
        view = QueuedView(
            position=position,
            job_id=one.job,
            name=names[one.job],
            owner=one.owner,
            priority=one.priority,
            ranks=one.takes.ranks,
            gpus=one.takes.gpus,
            reason=row.reason,
            message=row.message,
            created_at=one.created_at,
        )
        items.append(view)
    return Page[QueuedView](items=items)
