"""Where queued jobs stand: the launcher's order, read only as far as is asked, and by counting where that is enough.

Jobs are given in the order in which the launcher goes through all of them. Those whose attempt could not be made come last there,
and count with their owners where they would stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import JobPhase
from ratchet_service import queue_rows, quotas
from ratchet_service.models import Job
from ratchet_service.queue_order import Queued, in_line, in_turns
from ratchet_service.queue_rows import QUEUED, UNMADE, Row

_FIRST: Final = 16
"""Rows of one owner that are read at first, at the least."""


@dataclass(frozen=True)
class Standing:
    """``position``: from 1; None where a back-off holds the job (``ahead`` None), or it is too far behind to be placed.
    ``ahead``: so many are ahead of it, without a position so many at least."""

    position: int | None = None
    ahead: int | None = None

    @property
    def at_least(self) -> int | None:
        """How many are ahead of a job that has no position, as far as that is known."""
        return self.ahead if self.position is None else None


def standing(session: Session, now: datetime, job: Job, deepest: int) -> Standing:
    """Of a queued job. Those of one owner alone in its priority, and the first ``deepest`` of several owners, have a position."""
    if session.scalar(sa.select(Job.id).where(Job.id == job.id, queue_rows.due(now))) is None:
        return Standing()
    if job.reason == UNMADE:
        last = len(queue_rows.unmade(session, now))
        made = max(0, waiting(session, now) - last)
        return Standing(made + 1, made) if last == 1 else _walked(session, now, job.id, deepest, made)
    ahead, alone = _ahead(session, now, job)
    if alone:
        return Standing(ahead + 1, ahead)
    return Standing(None, ahead) if ahead >= deepest else _walked(session, now, job.id, deepest, ahead)


def waiting(session: Session, now: datetime) -> int:
    """Jobs in the queue in all."""
    return _count(session, queue_rows.due(now))


def _walked(session: Session, now: datetime, job_id: str, deepest: int, ahead: int) -> Standing:
    for n, row in enumerate(everybody(session, now, deepest, ahead + 1), 1):
        if row.queued.job == job_id:
            return Standing(n, n - 1)
        if n >= deepest:
            break
    return Standing(None, max(ahead, deepest))


def everybody(session: Session, now: datetime, likely: int, of_each: int | None = None) -> Iterator[Row]:
    """All of the queue, in order. How much is read at once goes by how many will be asked for: about ``likely``, and of each
    owner hardly more than ``of_each``."""
    claims: dict[str, list[Row]] = {}
    for row in queue_rows.claiming(session, now):
        claims.setdefault(row.queued.owner, []).append(row)
    read: dict[str, Row] = {}
    rows = queue_rows.Lines(session, now, None)

    def line(owner: str, priorities: list[tuple[int, int]]) -> Iterator[Queued]:
        mine = sorted(claims.get(owner, ()), key=lambda row: in_line(row.queued))
        ids = {row.queued.job for row in mine}
        others = (row for row in rows.of(owner, priorities, first) if row.queued.job not in ids)
        for row in merge(mine, others, key=lambda row: in_line(row.queued)) if mine else others:
            read[row.queued.job] = row
            yield row.queued

    owners = queue_rows.owners(session)
    share = likely * 5 // 4 // max(1, len(owners))  # they take turns, some a little more often than others
    first = max(_FIRST, share if of_each is None else min(share, of_each))
    lines = {owner: line(owner, priorities) for owner, priorities in owners.items()}
    last = []
    for place in in_turns(lines, queue_rows.held(session), quotas.limits(session)):
        row = read.pop(place.queued.job)
        if row.reason == UNMADE:
            last.append(row)
        else:
            yield row
    yield from last


def _ahead(session: Session, now: datetime, job: Job) -> tuple[int, bool]:
    """How many are ahead of it for sure: those of a higher priority, and of its owner's; and whether that is everybody."""
    higher, others = 0, False
    for owner, priorities in queue_rows.owners(session).items():
        higher += sum(count for priority, count in priorities if priority > job.priority)
        others |= owner != job.owner and any(priority == job.priority for priority, _ in priorities)
    higher -= _absent(session, now, Job.priority > job.priority)
    # Several statements: on PostgreSQL a job that backs off between two of them is taken off without having been counted.
    return max(0, higher + _ahead_in_line(session, now, job)), not others


def _ahead_in_line(session: Session, now: datetime, job: Job) -> int:
    """Of its owner's and its priority."""
    rows = (row for row in queue_rows.claiming(session, now) if row.reason != UNMADE)
    claims = [row.queued for row in rows if (row.queued.owner, row.queued.priority) == (job.owner, job.priority)]
    own = next((one for one in claims if one.job == job.id), None)
    if own is not None:
        return sum(in_line(one) < in_line(own) for one in claims)
    earlier = (Job.created_at < job.created_at) | ((Job.created_at == job.created_at) & (Job.id < job.id))
    line = (Job.owner == job.owner) & (Job.priority == job.priority) & (Job.created_at <= job.created_at) & earlier
    passing = sum((one.created_at, one.job) > (job.created_at, job.id) for one in claims)
    return _count(session, (Job.phase == JobPhase.QUEUED) & line) - _absent(session, now, line) + passing


def _absent(session: Session, now: datetime, which: sa.ColumnElement[bool]) -> int:
    """Queued jobs that a back-off holds, or that stand at the end: few as a rule, and each found by an index of its own. So
    ``which`` is no part of what they are looked for by."""
    held = sa.and_(Job.phase == JobPhase.QUEUED, Job.not_before > now, ~queue_rows.due(now))
    last = sa.and_(QUEUED, Job.reason == UNMADE, queue_rows.due(now))
    counted = sa.select(sa.func.count(sa.case((which, 1))))
    return sum(session.scalar(counted.where(absent)) or 0 for absent in (held, last))


def _count(session: Session, which: sa.ColumnElement[bool]) -> int:
    return session.scalar(sa.select(sa.func.count()).select_from(Job).where(which)) or 0
