"""A job's history, oldest first."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api import EventView, Page
from ratchet_contract.errors import Refused
from ratchet_service import cursors
from ratchet_service.models import Event
from ratchet_service.usecases.queries import find_job
from ratchet_service.usecases.views import event_view


def list_events(
    session: Session, job_id: str, limit: int, cursor: str | None, attempt: int | None = None, kind: str | None = None
) -> Page[EventView]:
    """Of one ``attempt``, or of one ``kind`` (``EventView.type``); None: of all."""
    find_job(session, job_id)
    wanted = {column: value for column, value in (("epoch", attempt), ("type", kind)) if value is not None}
    digest = cursors.query_digest(of="events", job=job_id, **wanted)
    after = cursors.decode(cursor, digest, (int,)) or [0]
    rows = events_after(session, job_id, after[0], limit + 1, **wanted)
    page = rows[:limit]
    following = cursors.encode(digest, [page[-1].id]) if len(rows) > limit else None
    return Page[EventView](items=page, next_cursor=following)


def events_after(session: Session, job_id: str, last_id: int, limit: int, **wanted: Any) -> list[EventView]:
    """``wanted``: values of columns."""
    query = sa.select(Event).where(Event.job_id == job_id, Event.id > last_id).filter_by(**wanted)
    query = query.order_by(Event.id).limit(limit)
    return [event_view(row) for row in session.scalars(query)]


def parse_last_id(text: str | None) -> int:
    """``Last-Event-ID`` of an event stream; 0 without one. Raises ``Refused``."""
    if text is None or text == "":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Refused(f"Last-Event-ID must be an event's id, not {text!r}", code="invalid-parameter")
    return int(text)
