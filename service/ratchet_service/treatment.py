"""What an attempt's end counts as: its cause's outcome and budget, or what the spec says of its exit code. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ratchet_contract.phases import Budget, Cause, Outcome
from ratchet_contract.spec_policy import ExitRule
from ratchet_service.decision import AttemptEnd

_MEANS: Final[dict[str, tuple[Outcome, Budget]]] = {
    "retry": (Outcome.FAILED, Budget.NONE),
    "fail": (Outcome.FAILED, Budget.FATAL),
    "preempted": (Outcome.PREEMPTED, Budget.PREEMPTIONS),
}


class Treatment(NamedTuple):
    """``rule``: a sentence about the rule of ``policy.exit_codes`` that applied; None: none did."""

    cause: Cause
    outcome: Outcome
    budget: Budget
    rule: str | None = None


def treatment(cause: Cause, end: AttemptEnd, rules: Sequence[ExitRule]) -> Treatment:
    """``cause`` is that of the attempt, as far as it is known. Rules are for what a rank's own code did to its process
    (``exception``): what was done to it from outside, and what Ratchet found out itself, has a cause of its own."""
    if cause is Cause.EXCEPTION and end.exit_code is not None:
        for i, rule in enumerate(rules):
            if rule.has(end.exit_code):
                text = f"exit code {end.exit_code}: {rule.action}, by policy.exit_codes[{i}]"
                return Treatment(cause, *_MEANS[rule.action], text)
    return Treatment(cause, cause.outcome, cause.budget)
