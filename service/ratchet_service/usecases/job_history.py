"""Reads a job's attempts, newest first, their environments, and the job's events."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

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

AttemptPart = Literal["components", "nodes"]
EventSort = Literal["id", "-id"]


def list_attempts(
    session: Session, job_id: str, limit: int, cursor: str | None, exclude: Collection[AttemptPart] = ()
) -> Page[AttemptView]:
    """Return a page of the job's attempts, newest first. ``exclude``: parts that are left empty. Raises ``NotFound`` for an
    unknown job, ``Refused`` (``bad-cursor``)."""
    job = find_job(session, job_id)
    digest = pagination.query_digest(of="attempts", job=job_id)
    query = sa.select(Attempt).where(Attempt.job_id == job_id)
    after = pagination.decode(cursor, digest, (int,))
    if after is not None:
        query = query.where(Attempt.number < after[0])
    rows = list(session.scalars(query.order_by(Attempt.number.desc()).limit(limit + 1)))
    page = rows[:limit]
    nodes = {} if "nodes" in exclude else _nodes(session, job_id, [row.number for row in page])
    components = "components" not in exclude
    following = pagination.encode(digest, [page[-1].number]) if len(rows) > limit else None
    spent = attempt_goodput(session, job, page)
    views = [attempt_view(row, nodes.get(row.number, []), spent[row.number], components=components) for row in page]
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
    session: Session,
    job_id: str,
    limit: int,
    cursor: str | None,
    attempt: int | None = None,
    types: Collection[str] = (),
    sort: EventSort = "id",
) -> Page[EventView]:
    """Return a page of the job's events in order of ``sort``: oldest first, or newest first (``-id``). ``attempt``: only those of
    this attempt; 0: of none. ``types``: only those of these types; empty: of all. Raise ``NotFound`` or ``Refused``."""
    find_job(session, job_id)
    digest = pagination.query_digest(of="events", job=job_id, attempt=attempt, types=sorted(types), sort=sort)
    query = sa.select(Event).where(Event.job_id == job_id)
    if attempt is not None:
        query = query.where(Event.attempt.is_(None) if attempt == 0 else Event.attempt == attempt)
    if types:
        query = query.where(Event.type.in_(types))
    last = pagination.decode(cursor, digest, (int,))
    if last is not None:
        query = query.where(Event.id > last[0] if sort == "id" else Event.id < last[0])
    query = query.order_by(Event.id if sort == "id" else Event.id.desc()).limit(limit + 1)
    rows = [event_view(row) for row in session.scalars(query)]
    page = rows[:limit]
    following = pagination.encode(digest, [page[-1].id]) if len(rows) > limit else None
    return Page[EventView](items=page, next_cursor=following)


def events_after(session: Session, job_id: str, last_id: int, limit: int) -> list[EventView]:
    """Return at most ``limit`` events with an id greater than ``last_id``, oldest first."""
    query = sa.select(Event).where(Event.job_id == job_id, Event.id > last_id).order_by(Event.id).limit(limit)
    return [event_view(row) for row in session.scalars(query)]


def parse_last_id(text: str | None) -> int:
    """Return the event id in a ``Last-Event-ID`` header; 0 if there is none. Raises ``Refused`` (``invalid-parameter``)."""
    if text is None or text == "":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Refused(f"Last-Event-ID must be an event's id, not {text!r}", code="invalid-parameter")
    return int(text)
