"""Steps that an attempt did again, as its ranks tell of them: kept rank by rank on the attempt, shown as one.

A step counts as compared where all ranks have compared it. They compare the same steps in the same order, so that the smallest of
their numbers is that of all.
"""

from __future__ import annotations

from typing import Any

from ratchet_contract.messages import RedoneSteps
from ratchet_contract.resume import Redone, ResumeReport, StepDifference
from ratchet_service.models import Attempt
from ratchet_service.storable import storable

DIFFERENCE = "replay-difference"
"""The event of an attempt's first step that was not the same when it was done again."""


def add_redone(attempt: Attempt, rank: int, message: RedoneSteps) -> StepDifference | None:
    """Keep what ``rank`` tells; the difference, where it is the attempt's first to be told."""
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
        "reason": None if message.reason is None else storable(message.reason)[:4000],
        "ranks": {**before["ranks"], str(rank): [message.compared, message.equal]},
        "first_difference": None if first is None else first.model_dump(mode="json"),
    }
    return found if known is None else None


def redone_of(attempt: Attempt) -> Redone:
    """Of all ranks. An attempt that has told nothing has done no step again."""
    kept = attempt.redone
    if kept is None:
        return Redone()
    numbers = kept["ranks"].values() if len(kept["ranks"]) == kept["world_size"] else [[0, 0]]
    compared, equal = (min(column) for column in zip(*numbers, strict=True))
    return Redone(
        steps=kept["steps"],
        compared=compared,
        equal=equal,
        first_difference=kept["first_difference"],
        reason=kept["reason"],
    )


def with_proof(report: ResumeReport, redone: Redone) -> ResumeReport:
    """What a rank reported before its first step, and the steps behind that have shown to be wrong, is not exact."""
    if redone.first_difference is None:
        return report
    notes = [*report.notes, redone.first_difference.sentence()]
    return report.model_copy(update={"verdict": "not-exact", "notes": notes})


def metrics_that_differ(attempt: Attempt, redone: Redone) -> list[str]:
    """Names of logged values that differ at steps whose fingerprints are equal: times, as a rule."""
    if redone.equal == 0:
        return []
    end = None if redone.first_difference is None else redone.first_difference.step
    return sorted(name for name, step in (attempt.metrics_differ or {}).items() if end is None or step < end)
