"""Attempts of a job, newest first."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api import AttemptView, EnvironmentView, Page
from ratchet_contract.paths import HomePaths
from ratchet_service import cursors
from ratchet_service.launchers.files import read_message
from ratchet_service.models import Attempt, AttemptNode
from ratchet_service.usecases.queries import find_attempt, find_job
from ratchet_service.usecases.spent import of_attempts
from ratchet_service.usecases.views import attempt_view


def list_attempts(session: Session, job_id: str, limit: int, cursor: str | None) -> Page[AttemptView]:
    job = find_job(session, job_id)
    digest = cursors.query_digest(of="attempts", job=job_id)
    query = sa.select(Attempt).where(Attempt.job_id == job_id)
    after = cursors.decode(cursor, digest, (int,))
    if after is not None:
        query = query.where(Attempt.number < after[0])
    rows = list(session.scalars(query.order_by(Attempt.number.desc()).limit(limit + 1)))
    page = rows[:limit]
    nodes = _nodes(session, job_id, [row.number for row in page])
    following = cursors.encode(digest, [page[-1].number]) if len(rows) > limit else None
    spent = of_attempts(session, job, page)
    views = [attempt_view(row, nodes.get(row.number, []), spent[row.number]) for row in page]
    return Page[AttemptView](items=views, next_cursor=following)


def get_attempt(session: Session, job_id: str, number: str) -> AttemptView:
    attempt = find_attempt(session, job_id, number)
    spent = of_attempts(session, find_job(session, job_id), [attempt])
    nodes = _nodes(session, job_id, [attempt.number])
    return attempt_view(attempt, nodes.get(attempt.number, []), spent[attempt.number])


def environment(homes: HomePaths, job_id: str, number: int) -> EnvironmentView | None:
    """What the attempt trained with, as its rank 0 wrote it."""
    return read_message(homes.job(job_id).attempt(number).environment_file, EnvironmentView)


def newest_environment(homes: HomePaths, job_id: str, newest: int) -> EnvironmentView | None:
    """Of attempt ``newest`` of the job, or of the one before while that has not begun to train."""
    looks = (environment(homes, job_id, number) for number in (newest, newest - 1) if number > 0)
    return next((found for found in looks if found is not None), None)


def _nodes(session: Session, job_id: str, numbers: list[int]) -> dict[int, list[AttemptNode]]:
    query = sa.select(AttemptNode).where(AttemptNode.job_id == job_id, AttemptNode.attempt.in_(numbers))
    out: dict[int, list[AttemptNode]] = {}
    for node in session.scalars(query.order_by(AttemptNode.node)):
        out.setdefault(node.attempt, []).append(node)
    return out
