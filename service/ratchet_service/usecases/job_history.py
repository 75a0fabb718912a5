"""Reads a job's attempts, newest first, their environments, and the job's events, oldest first."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.views import AttemptView, EnvironmentView, EventView, Page
from ratchet_contract.errors import Refused
from ratchet_contract.paths import HomePaths
from ratchet_service.db.models import Attempt, AttemptNode, Event
from ratchet_service.db.queries import find_attempt, find_job
from ratchet_service.launchers.attempt_files import read_message
from ratchet_service.usecases import pagination
from ratchet_service.usecases.goodput import attempt_goodput
from ratchet_service.usecases.views import attempt_view, event_view


def list_attempts(session: Session, job_id: str, limit: int, cursor: str | None) -> Page[AttemptView]:
    """Return a page of the job's attempts, newest first. Raises ``NotFound`` for an unknown job, ``Refused`` (``bad-cursor``)."""
    job = find_job(session, job_id)
    digest = pagination.query_digest(of="attempts", job=job_id)
    query = sa.select(Attempt).where(Attempt.job_id == job_id)
    after = pagination.decode(cursor, digest, (int,))
    if after is not None:
        query = query.where(Attempt.number < after[0])
    rows = list(session.scalars(query.order_by(Attempt.number.desc()).limit(limit + 1)))
    page = rows[:limit]
    nodes = _nodes(session, job_id, [row.number for row in page])
    following = pagination.encode(digest, [page[-1].number]) if len(rows) > limit else None
    spent = attempt_goodput(session, job, page)
    views = [attempt_view(row, nodes.get(row.number, []), spent[row.number]) for row in page]
    return Page[AttemptView](items=views, next_cursor=following)


def get_attempt(session: Session, job_id: str, number: str) -> AttemptView:
    """Return one attempt with its nodes and goodput. Raises ``NotFound`` for an unknown job or attempt."""
    attempt = find_attempt(session, job_id, number)
    spent = attempt_goodput(session, find_job(session, job_id), [attempt])
    nodes = _nodes(session, job_id, [attempt.number])
    return attempt_view(attempt, nodes.get(attempt.number, []), spent[attempt.number])


def attempt_environment(homes: HomePaths, job_id: str, number: int) -> EnvironmentView | None:
    """Return the environment that the attempt trained with; None: its rank 0 has left no readable, valid file."""
    return read_message(homes.job(job_id).attempt(number).environment_file, EnvironmentView)


def newest_environment(homes: HomePaths, job_id: str, newest: int) -> EnvironmentView | None:
    """Return the environment that attempt ``newest`` recorded, else that of the attempt before it, else None."""
    looks = (attempt_environment(homes, job_id, number) for number in (newest, newest - 1) if number > 0)
    return next((found for found in looks if found is not None), None)


def _nodes(session: Session, job_id: str, numbers: list[int]) -> dict[int, list[AttemptNode]]:
    """Return the nodes of the attempts ``numbers``, by attempt number, in order of node numbers. Attempts without nodes are
    absent."""
    query = sa.select(AttemptNode).where(AttemptNode.job_id == job_id, AttemptNode.attempt.in_(numbers))
    out: dict[int, list[AttemptNode]] = {}
    for node in session.scalars(query.order_by(AttemptNode.node)):
        out.setdefault(node.attempt, []).append(node)
    return out


def list_events(
    session: Session, job_id: str, limit: int, cursor: str | None, attempt: int | None = None, kind: str | None = None
) -> Page[EventView]:
    """Return a page of the job's events, oldest first; may be limited to one attempt or type. Raise ``NotFound`` or
    ``Refused``."""
    find_job(session, job_id)
    filters = {column: value for column, value in (("attempt", attempt), ("type", kind)) if value is not None}
    digest = pagination.query_digest(of="events", job=job_id, **filters)
    after = pagination.decode(cursor, digest, (int,)) or [0]
    rows = events_after(session, job_id, after[0], limit + 1, **filters)
    page = rows[:limit]
    following = pagination.encode(digest, [page[-1].id]) if len(rows) > limit else None
    return Page[EventView](items=page, next_cursor=following)


def events_after(session: Session, job_id: str, last_id: int, limit: int, **filters: Any) -> list[EventView]:
    """Return at most ``limit`` events with an id greater than ``last_id``, oldest first. ``filters``: values of columns."""
    query = sa.select(Event).where(Event.job_id == job_id, Event.id > last_id).filter_by(**filters)
    query = query.order_by(Event.id).limit(limit)
    return [event_view(row) for row in session.scalars(query)]


def parse_last_id(text: str | None) -> int:
    """Return the event id in a ``Last-Event-ID`` header; 0 if there is none. Raises ``Refused`` (``invalid-parameter``)."""
    if text is None or text == "":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Refused(f"Last-Event-ID must be an event's id, not {text!r}", code="invalid-parameter")
    return int(text)
