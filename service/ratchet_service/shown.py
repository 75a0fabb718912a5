"""What an attempt has shown of itself beside its cause: when it was asked to stop, when its end began, its job's pace."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.deadlines import Pace, joined
from ratchet_contract.messages import AttemptResult
from ratchet_service.models import Attempt


def stop_at(results: Sequence[AttemptResult]) -> datetime | None:
    """When the first agent heard of a stop, by its clock."""
    return min((at for r in results if (at := _time(r.stop_at)) is not None), default=None)


def over_at(results: Sequence[AttemptResult]) -> datetime | None:
    """When what ended the ranks began, by their node's clock: of nodes that were not ended for another's sake."""
    began = [r.began_at for r in results if r.began_at is not None and not r.secondary]
    try:
        return datetime.fromtimestamp(min(began), UTC) if began else None
    except (ValueError, OverflowError, OSError):  # no time at all: nothing is known
        return None


def pace_until(session: Session, job_id: str, number: int, results: Sequence[AttemptResult] = ()) -> Pace | None:
    """What attempt ``number`` (its agents' ``results``) and those before it have shown. A hang of one node is the attempt's."""
    own: Pace | None = None
    for result in results:
        own = joined(own, result.pace)
    if own is not None:
        own = own.model_copy(update={"hung": any(r.pace is not None and r.pace.hung for r in results)})
    return joined(pace_before(session, job_id, number), own)


def pace_before(session: Session, job_id: str, number: int) -> Pace | None:
    """What attempt ``number`` is told: what those before it have shown."""
    row = session.get(Attempt, (job_id, number - 1)) if number > 1 else None
    try:
        return None if row is None or row.pace is None else Pace.model_validate(row.pace)
    except ValidationError:  # of another version: it is learned again
        return None


def _time(text: str | None) -> datetime | None:
    try:
        at = None if text is None else datetime.fromisoformat(text)
    except ValueError:
        return None
    return at if at is not None and at.tzinfo is not None else None
