"""Facts about an attempt other than the cause of its end, such as when it received a stop request. Also the job's pace."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import MAXYEAR, MINYEAR, UTC, datetime

from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.protocol.messages import AttemptResult
from ratchet_contract.protocol.timing import Pace, merge_paces
from ratchet_service.db.models import Attempt
from ratchet_service.db.sanitize import parse_time


def stop_received_at(results: Sequence[AttemptResult]) -> datetime | None:
    """Return the earliest time in ``results`` at which an agent received a stop request, by its own clock; None: no valid one."""
    return min((at for r in results if (at := parse_time(r.stop_at or "", None)) is not None), default=None)


def end_began_at(results: Sequence[AttemptResult]) -> datetime | None:
    """Return when the event that ended the ranks began, by the clock of its node; None: not known."""
    # a secondary end only follows the failure of another node
    began = [r.began_at for r in results if r.began_at is not None and not r.secondary]
    try:
        at = datetime.fromtimestamp(min(began), UTC) if began else None
    except (ValueError, OverflowError, OSError):  # not a valid time: nothing is known
        return None
    return (
        at if at is not None and MINYEAR < at.year < MAXYEAR else None
    )  # others may have no date in another time zone


def pace_until(session: Session, job_id: str, number: int, results: Sequence[AttemptResult] = ()) -> Pace | None:
    """Return the job's pace up to attempt ``number``; None: none is known. A pace has the longest durations that turned out to be
    no hang. The pace that was stored at the end of the attempt before is merged with those in ``results``, the results of this
    attempt's agents."""
    own: Pace | None = None
    for result in results:
        own = merge_paces(own, result.pace)
    if own is not None:
        own = own.model_copy(update={"hung": any(r.pace is not None and r.pace.hung for r in results)})
    return merge_paces(pace_before(session, job_id, number), own)


def pace_before(session: Session, job_id: str, number: int) -> Pace | None:
    """Return the pace that was stored when the attempt before ``number`` ended; None: none that can be parsed."""
    row = session.get(Attempt, (job_id, number - 1)) if number > 1 else None
    try:
        return None if row is None or row.pace is None else Pace.model_validate(row.pace)
    except ValidationError:  # of another version: it is learned again
        return None
