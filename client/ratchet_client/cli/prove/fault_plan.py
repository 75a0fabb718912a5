"""Plans where to interrupt a run, from the facts of undisturbed runs. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ratchet_client.cli.prove.trials import EVERY, Facts

REDONE: Final = 2
"""Minimum number of steps that each kill loses."""
_WORDS: Final = {
    "kill-rank": "rank {rank} killed", "kill-agent": "the agent of rank {rank} killed", "preempt": "preempted",
    "kill-in-evaluation": "rank {rank} killed in the evaluation",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A planned interruption of the attempt ``attempt`` when ``step`` steps are done. ``rank``: the rank that is killed, itself
    or with its agent, or that requests the preemption of all ranks. ``kind``: the kind of interruption, a key of ``_WORDS``."""

    attempt: int
    rank: int
    step: int
    kind: str

    @property
    def text(self) -> str:
        """The fault as text, like ``rank 1 killed after step 7``."""
        return f"{_WORDS[self.kind].format(rank=self.rank)} after step {self.step}"

    def to_spec(self) -> dict[str, Any]:
        """Return the fault in the form of the spec's ``trial.faults``."""
        return {"attempt": self.attempt, "rank": self.rank, "step": self.step, "kind": self.kind}


@dataclass(frozen=True)
class FaultPlan:
    """The interruptions of a run. ``every``: steps between the run's checkpoints."""

    every: int
    faults: list[Fault]


def fault_plan(facts: Facts, ranks: int) -> FaultPlan | None:
    """Return the plan with the most interruptions that fit into a run; None if no kill is among them. ``facts``: the facts of an
    undisturbed run. ``ranks``: number of ranks."""
    plans = [FaultPlan(every, _faults(facts, ranks, every)) for every in (EVERY, *range(3, 2 * EVERY))]
    best = max(plans, key=lambda plan: len(plan.faults))  # the first of equal ones
    return best if any(fault.kind.startswith("kill") for fault in best.faults) else None


def _faults(facts: Facts, ranks: int, every: int) -> list[Fault]:
    """Return the interruptions that fit with a checkpoint every ``every`` steps. Each kill is at least ``REDONE`` steps after a
    checkpoint."""
    last = facts.step - 1
    behind = max(
        [*facts.epoch_ends[:1], *(step for phase, step in facts.phases.items() if phase != "warm-up")], default=0
    )
    within = min([*facts.epoch_ends[:1], last])
    wanted: list[tuple[str, Sequence[int]]] = [
        ("kill-rank", range(every, within + 1)),
        ("kill-in-evaluation", [step for step in facts.evaluations if step <= last]),
        ("kill-agent", [*range(behind + 1, last + 1), *range(every, last + 1)]),
        ("preempt", range(max(behind, every) + 1, last + 1)),
    ]
    out: list[Fault] = []
    done = 0
    for kind, steps in wanted:
        fits = (s for s in steps if s > done and s >= every and (kind == "preempt" or s % every >= REDONE))
        if (step := next(fits, None)) is not None:
            rank = (ranks - 1, 0)[len(out) % 2]
            out.append(Fault(len(out) + 1, rank, step, kind))
            done = step
    return out
