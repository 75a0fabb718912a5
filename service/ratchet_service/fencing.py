"""An attempt that is over changes nothing any more, whatever it sends; that it tried is told on the job's history.

The number of an attempt is the token: only the newest one that has not ended is listened to. Refusals are counted on the
attempt's row, and the 1st, 10th, 100th ... is an event, so that one that never stops asking fills no history.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract.errors import Conflict
from ratchet_contract.phases import AttemptPhase
from ratchet_service.database import Database, first_line
from ratchet_service.ingest_rows import AttemptRow, JobRow
from ratchet_service.models import Attempt, Job
from ratchet_service.transitions import add_event

log = logging.getLogger(__name__)

STALE_REQUEST: Final = "stale-request"


class Stale(Conflict):
    """The attempt is not the job's newest one, or has ended."""

    code = "stale-epoch"


def fence(job: Job | JobRow, attempt: Attempt | AttemptRow) -> None:
    """Raises ``Stale`` for an attempt that is not the job's newest one, or has ended."""
    if attempt.number != job.epoch or attempt.phase is AttemptPhase.ENDED:
        raise Stale(f"attempt {attempt.number} is over (the newest one is {job.epoch}): end its ranks")


@contextmanager
def refusals(database: Database, job_id: str, epoch: int, what: str) -> Iterator[None]:
    """What is refused as ``Stale`` within the block is counted, and told; no transaction is open around it. ``what``: the
    request, in words."""
    try:
        yield
    except Stale:
        try:
            _count(database, job_id, epoch, what)
        except SQLAlchemyError as error:  # the refusal itself must reach the agent
            log.warning("%s, attempt %d: a refusal was not counted: %s", job_id, epoch, first_line(error))
        raise


def _count(database: Database, job_id: str, epoch: int, what: str) -> None:
    with database.write() as session:
        job = session.scalar(sa.select(Job).where(Job.id == job_id).with_for_update())
        attempt = session.get(Attempt, (job_id, epoch), populate_existing=True)
        if job is None or attempt is None:
            return
        attempt.refused += 1
        if str(attempt.refused).strip("0") == "1":
            text = f"attempt {epoch} is over, and {what} was refused"
            if attempt.refused > 1:
                text += f", the {attempt.refused}th request of its"
            add_event(session, job_id, STALE_REQUEST, text, epoch=epoch, data={"refused": attempt.refused})
