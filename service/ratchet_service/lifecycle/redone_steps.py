"""Stores what the ranks of an attempt report about replayed steps, and combines the reports of all ranks into one result."""

from __future__ import annotations

from typing import Any

from ratchet_contract.checkpoint.resume_report import Redone, ResumeReport, StepDifference
from ratchet_contract.protocol.messages import RedoneSteps
from ratchet_service.db.models import Attempt
from ratchet_service.db.sanitize import sanitize_text


def add_redone(attempt: Attempt, rank: int, message: RedoneSteps) -> StepDifference | None:
    """Store on ``attempt`` what ``rank`` reports about replayed steps. Return the reported difference if none was
    reported for the attempt before, otherwise None."""
    before: dict[str, Any] = attempt.redone or {"ranks": {}, "first_difference": None}
    found, known = message.first_difference, before["first_difference"]
    if found is not None:
        found = found.model_copy(update={"rank": rank})
    first = min(
        (d for d in (found, None if known is None else StepDifference.model_validate(known)) if d is not None),
        key=lambda d: (d.step, d.rank),
        default=None,
    )
    attempt.redone = {
        "world_size": message.world_size,
        "steps": message.steps,
        "reason": None if message.reason is None else sanitize_text(message.reason)[:4000],
        "ranks": {**before["ranks"], str(rank): [message.compared, message.equal]},
        "first_difference": None if first is None else first.model_dump(mode="json"),
    }
    return found if known is None else None


def redone_of(kept: dict[str, Any] | None) -> Redone:
    """Return the result over all ranks of an attempt. ``kept``: its column ``redone``. No step counts as compared before all
    ranks have reported."""
    if kept is None:
        return Redone()
    numbers = kept["ranks"].values() if len(kept["ranks"]) == kept["world_size"] else [[0, 0]]
    # ranks compare the same steps in the same order, so the smallest count holds for all
    compared, equal = (min(column) for column in zip(*numbers, strict=True))
    return Redone(
        steps=kept["steps"],
        compared=compared,
        equal=equal,
        first_difference=kept["first_difference"],
        reason=kept["reason"],
    )


def with_replay_verdict(report: ResumeReport, redone: Redone) -> ResumeReport:
    """Return ``report``; if a replayed step has differed, a copy with the verdict ``not-exact`` and a note on the difference."""
    if redone.first_difference is None:
        return report
    notes = [*report.notes, redone.first_difference.sentence()]
    return report.model_copy(update={"verdict": "not-exact", "notes": notes})


def differing_metrics(attempt: Attempt, redone: Redone) -> list[str]:
    """Return the sorted names of metrics whose values differ at replayed steps that are otherwise equal."""
    if redone.equal == 0:
        return []
    end = None if redone.first_difference is None else redone.first_difference.step
    return sorted(name for name, step in (attempt.metrics_differ or {}).items() if end is None or step < end)
