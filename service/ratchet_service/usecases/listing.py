"""Lists of jobs: filters, order, pages. As quick with a million jobs in the database as with a thousand.

A filter that few jobs meet is looked up first, and only those are read and put in order. Where many meet every filter, the list
is read in its own order along an index: creation by phase, name, owner or label. What is left, and takes longer the
more jobs there are, is a page of jobs that many filters hold for one by one, and hardly a job for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session, aliased

from ratchet_contract.api import JobView, Page
from ratchet_contract.errors import Refused
from ratchet_contract.phases import JobPhase
from ratchet_service import cursors
from ratchet_service.models import Job, JobLabel
from ratchet_service.usecases.views import job_views

FEW: Final = 500
"""Jobs that are read and sorted for one page rather than looked for along an index."""

Sort = Literal["created", "-created", "name", "-name", "priority", "-priority"]
_COLUMNS: Final = {"created": "created_at", "name": "name", "priority": "priority"}


@dataclass(frozen=True)
class JobFilter:
    """All given conditions hold together; several phases mean any of them."""

    phases: tuple[JobPhase, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    name: str | None = None
    sort: Sort = "-created"
    owner: str | None = None

    def digest(self) -> str:
        phases = sorted(p.value for p in self.phases)
        return cursors.query_digest(
            of="jobs",
            phases=phases,
            labels=sorted(map(list, self.labels)),
            name=self.name,
            sort=self.sort,
            owner=self.owner,
        )


def parse_label(text: str) -> tuple[str, str]:
    """``key=value``. Raises ``Refused``."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise Refused(f"a label filter is key=value, not {text!r}", code="invalid-parameter")
    return key, value


def list_jobs(session: Session, wanted: JobFilter, limit: int, cursor: str | None) -> Page[JobView]:
    """Keyset paging: what is inserted meanwhile never repeats or hides a job that was there before."""
    descending = wanted.sort.startswith("-")
    key = wanted.sort.removeprefix("-")
    few = _few(session, wanted)
    query, column, ident = _matching(wanted, few, key)
    after = cursors.decode(cursor, wanted.digest(), (int if key == "priority" else str, str))
    if after is not None:
        row, position = sa.tuple_(column, ident), sa.tuple_(sa.literal(_value(key, after[0]), column.type), after[1])
        query = query.where(row < position if descending else row > position)
    order = (column.desc(), ident.desc()) if descending else (column, ident)
    rows = session.execute(query.add_columns(column).order_by(*order).limit(limit + 1)).all()
    page = [job for job, _ in rows[:limit]]
    following = None
    if len(rows) > limit:  # by the column that the list is ordered by, which a label has for itself
        following = cursors.encode(wanted.digest(), [_text(key, rows[limit - 1][1]), page[-1].id])
    return Page[JobView](items=job_views(session, page), next_cursor=following)


def _few(session: Session, wanted: JobFilter) -> list[str] | None:
    """Ids of all jobs that meet one of the filters, the first that few jobs meet; None where there is none."""
    for query in _conditions(wanted):
        ids = list(session.scalars(query.limit(FEW + 1)))
        if len(ids) <= FEW:
            return ids
    return None


def _conditions(wanted: JobFilter) -> Iterator[sa.Select[str]]:
    """Each filter as a query for ids, by an index alone."""
    if wanted.name is not None:
        yield sa.select(Job.id).where(Job.name == wanted.name)
    for key, value in wanted.labels:
        yield sa.select(JobLabel.job_id).where(JobLabel.key == key, JobLabel.value == value)
    if wanted.owner is not None:
        yield sa.select(Job.id).where(Job.owner == wanted.owner)
    if wanted.phases:
        yield sa.select(Job.id).where(Job.phase.in_(wanted.phases))


def _matching(wanted: JobFilter, few: list[str] | None, key: str) -> tuple[sa.Select[Job], Any, Any]:
    """Jobs that meet all filters, and the columns of the order. Of many jobs with a label those of the label's own index, which
    has them in the order of creation."""
    source, query, labels = Job, sa.select(Job), list(wanted.labels)
    column, ident = getattr(Job, _COLUMNS[key]), Job.id
    if few is not None:
        # Materialised, so that no database prefers another filter's index to these few keys.
        found = sa.select(Job).where(Job.id.in_(few)).cte("few").prefix_with("MATERIALIZED")
        source = aliased(Job, found)
        query, column, ident = sa.select(source), getattr(source, _COLUMNS[key]), source.id
    elif labels and key == "created":
        label, value = labels.pop(0)
        query = query.join(JobLabel, JobLabel.job_id == Job.id).where(JobLabel.key == label, JobLabel.value == value)
        column, ident = JobLabel.created_at, JobLabel.job_id
    if wanted.phases:
        query = query.where(source.phase.in_(wanted.phases))
    if wanted.name is not None:
        query = query.where(source.name == wanted.name)
    if wanted.owner is not None:
        query = query.where(source.owner == wanted.owner)
    other = aliased(JobLabel)
    for label, value in labels:
        query = query.where(sa.exists().where(other.job_id == source.id, other.key == label, other.value == value))
    return query, column, ident


def _text(key: str, value: Any) -> str | int:
    found: str | int = value.isoformat() if key == "created" else value
    return found


def _value(key: str, raw: Any) -> Any:
    if key != "created":
        return raw
    try:
        at = datetime.fromisoformat(raw)
        at.astimezone()
    except (ValueError, OverflowError):
        at = None
    if at is None or at.tzinfo is None:
        raise Refused("this cursor is not one that the server gave out; start again without it", code="bad-cursor")
    return at
