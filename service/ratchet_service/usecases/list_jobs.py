"""Lists of jobs: filters, order, pages. A filter that few jobs meet is evaluated first; otherwise the list is read along an
index. Slow only if many jobs meet each filter, but hardly any meets all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session, aliased

from ratchet_contract.api.views import JobView, Page
from ratchet_contract.errors import Refused
from ratchet_contract.phases import JobPhase
from ratchet_service.db.models import Job, JobLabel
from ratchet_service.usecases import pagination
from ratchet_service.usecases.job_summary import job_summaries
from ratchet_service.usecases.views import job_views

MAX_SELECTIVE_JOBS: Final = 500
"""If at most this number of jobs meet one filter, they are read and sorted for a page; otherwise the list is read along an
index."""

Sort = Literal["created", "-created", "name", "-name", "priority", "-priority"]
_NAME_PART: Final = re.compile(r"[-a-z0-9]+", re.ASCII)
"""Characters of names and ids of jobs."""
_AFTER_Z: Final = "{"
"""The character after the last of these."""
_COLUMNS: Final = {"created": "created_at", "name": "name", "priority": "priority"}


@dataclass(frozen=True)
class JobFilter:
    """Filters and order of a list of jobs. A job must meet every filter that is set. For ``phases``, the job must be in one of
    them."""

    phases: tuple[JobPhase, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    name: str | None = None
    sort: Sort = "-created"
    owner: str | None = None
    search: str | None = None  # what the name or the id begins with

    def digest(self) -> str:
        """Return a digest that identifies this filter and order in cursors."""
        phases = sorted(p.value for p in self.phases)
        return pagination.query_digest(
            of="jobs",
            phases=phases,
            labels=sorted(map(list, self.labels)),
            name=self.name,
            sort=self.sort,
            owner=self.owner,
            search=self.search,
        )


def parse_label(text: str) -> tuple[str, str]:
    """Return key and value of a label filter ``key=value``. Raises ``Refused`` (``invalid-parameter``)."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise Refused(f"a label filter is key=value, not {text!r}", code="invalid-parameter")
    return key, value


def list_jobs(
    session: Session, job_filter: JobFilter, limit: int, cursor: str | None, *, summary: bool = False
) -> Page[JobView]:
    """Return one page of the jobs that ``job_filter`` selects. ``cursor``: that of the page before. ``summary``: each job has its
    summary. Raise ``Refused`` for a bad cursor."""
    descending = job_filter.sort.startswith("-")
    key = job_filter.sort.removeprefix("-")
    selective_ids = _selective_ids(session, job_filter)
    query, column, ident = _matching_query(session, job_filter, selective_ids, key)
    after = pagination.decode(cursor, job_filter.digest(), (int if key == "priority" else str, str))
    if after is not None:
        row, position = (
            sa.tuple_(column, ident),
            sa.tuple_(sa.literal(_decode_sort_value(key, after[0]), column.type), after[1]),
        )
        query = query.where(row < position if descending else row > position)
    order = (column.desc(), ident.desc()) if descending else (column, ident)
    rows = session.execute(query.add_columns(column).order_by(*order).limit(limit + 1)).all()
    page = [job for job, _ in rows[:limit]]
    following = None
    if len(rows) > limit:  # from the column that the list is sorted by; a label has its own copy
        following = pagination.encode(job_filter.digest(), [_encode_sort_value(key, rows[limit - 1][1]), page[-1].id])
    items = job_views(session, page)
    if summary:
        found = job_summaries(session, page)
        items = [item.model_copy(update={"summary": found[item.id]}) for item in items]
    return Page[JobView](items=items, next_cursor=following)


def _selective_ids(session: Session, job_filter: JobFilter) -> list[str] | None:
    """Return the ids of all jobs that meet one filter, if at most ``MAX_SELECTIVE_JOBS`` do; else None."""
    for query in _single_filter_queries(session, job_filter):
        ids = list(session.scalars(query.limit(MAX_SELECTIVE_JOBS + 1)))
        if len(ids) <= MAX_SELECTIVE_JOBS:
            return ids
    return None


def _single_filter_queries(session: Session, job_filter: JobFilter) -> Iterator[sa.Select[str]]:
    """Yield for each filter a query for the ids of the jobs that meet it."""
    if job_filter.name is not None:
        yield sa.select(Job.id).where(Job.name == job_filter.name)
    if job_filter.search is not None:
        yield sa.select(Job.id).where(_begins_with(session, Job, job_filter.search))
    for key, value in job_filter.labels:
        yield sa.select(JobLabel.job_id).where(JobLabel.key == key, JobLabel.value == value)
    if job_filter.owner is not None:
        yield sa.select(Job.id).where(Job.owner == job_filter.owner)
    if job_filter.phases:
        yield sa.select(Job.id).where(Job.phase.in_(job_filter.phases))


def _begins_with(session: Session, source: Any, text: str) -> sa.ColumnElement[bool]:
    """Return the condition that the name or the id of a job begins with ``text``. ``source``: ``Job``, or an alias."""
    if not _NAME_PART.fullmatch(text):
        return sa.false()
    if session.get_bind().dialect.name == "sqlite":  # whose LIKE ignores case, and so uses no index
        return sa.or_(*((column >= text) & (column < text + _AFTER_Z) for column in (source.name, source.id)))
    return sa.or_(source.name.startswith(text), source.id.startswith(text))


def _matching_query(
    session: Session, job_filter: JobFilter, selective_ids: list[str] | None, key: str
) -> tuple[sa.Select[Job], Any, Any]:
    """Return the query for the jobs that meet all filters, its sort column and its id column. ``selective_ids``: the only jobs
    that can meet them, if known."""
    source, query, labels = Job, sa.select(Job), list(job_filter.labels)
    column, ident = getattr(Job, _COLUMNS[key]), Job.id
    if selective_ids is not None:
        # Materialised, so that the database does not prefer another filter's index to these few keys.
        found = sa.select(Job).where(Job.id.in_(selective_ids)).cte("few").prefix_with("MATERIALIZED")
        source = aliased(Job, found)
        query, column, ident = sa.select(source), getattr(source, _COLUMNS[key]), source.id
    # along the label's own index, which has them in order of creation
    elif labels and key == "created":
        label, value = labels.pop(0)
        query = query.join(JobLabel, JobLabel.job_id == Job.id).where(JobLabel.key == label, JobLabel.value == value)
        column, ident = JobLabel.created_at, JobLabel.job_id
    if job_filter.phases:
        query = query.where(source.phase.in_(job_filter.phases))
    if job_filter.name is not None:
        query = query.where(source.name == job_filter.name)
    if job_filter.search is not None:
        query = query.where(_begins_with(session, source, job_filter.search))
    if job_filter.owner is not None:
        query = query.where(source.owner == job_filter.owner)
    other = aliased(JobLabel)
    for label, value in labels:
        query = query.where(sa.exists().where(other.job_id == source.id, other.key == label, other.value == value))
    return query, column, ident


def _encode_sort_value(key: str, value: Any) -> str | int:
    """Return a value of the sort key as a cursor holds it: a time as ISO text."""
    found: str | int = value.isoformat() if key == "created" else value
    return found


def _decode_sort_value(key: str, raw: Any) -> Any:
    """Return the value of the sort key that a cursor holds. Raises ``Refused`` (``bad-cursor``)."""
    if key != "created":
        return raw
    try:
        at = datetime.fromisoformat(raw)
        at.astimezone()
    except (ValueError, OverflowError):
        at = None
    if at is None or at.tzinfo is None:
        raise pagination.unknown_cursor_error()
    return at
