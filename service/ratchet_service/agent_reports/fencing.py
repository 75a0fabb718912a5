"""Fences off attempts that are over: their requests are refused and counted on the attempt's row. Only some refusals become
events, so that no agent floods the history."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract.errors import Conflict
from ratchet_contract.phases import AttemptPhase, EventType
from ratchet_service.agent_reports.fast_rows import AttemptRow, JobRow
from ratchet_service.db.engine import Database, first_line
from ratchet_service.db.models import Attempt, Job
from ratchet_service.db.transitions import add_event

log = logging.getLogger(__name__)


class Stale(Conflict):
    """The request's attempt is not the job's newest one, or has ended."""

    code = "stale-attempt"


def raise_if_stale(job: Job | JobRow, attempt: Attempt | AttemptRow) -> None:
    """Raise ``Stale`` if the attempt is not the job's newest one, or has ended."""
    if attempt.number != job.attempt or attempt.phase is AttemptPhase.ENDED:
        raise Stale(f"attempt {attempt.number} is over (the newest one is {job.attempt}): end its ranks")


@contextmanager
def count_stale_requests(database: Database, job_id: str, attempt: int, request_name: str) -> Iterator[None]:
    """Context manager that counts a ``Stale`` error of its block, and raises it again. If the database fails during the count,
    this is only logged. No transaction may be open around the block. ``request_name``: the kind of request for the event's
    message, such as "a report"."""
    try:
        yield
    except Stale:
        try:
            _count_stale_request(database, job_id, attempt, request_name)
        except SQLAlchemyError as error:  # the refusal itself must reach the agent
            log.warning("%s, attempt %d: a refusal was not counted: %s", job_id, attempt, first_line(error))
        raise


def _count_stale_request(database: Database, job_id: str, attempt: int, request_name: str) -> None:
    """Count one refused request; nothing if the job or the attempt does not exist."""
    with database.write() as session:
        job = session.scalar(sa.select(Job).where(Job.id == job_id).with_for_update())
        row = session.get(Attempt, (job_id, attempt), populate_existing=True)
        if job is None or row is None:
            return
        row.late_requests += 1
        if str(row.late_requests).strip("0") == "1":
            text = f"attempt {attempt} is over: {request_name} was refused"
            if row.late_requests > 1:
                text += f", the {row.late_requests}th request of its"
            add_event(
                session, job_id, EventType.STALE_REQUEST, text, attempt=attempt, data={"refused": row.late_requests}
            )
