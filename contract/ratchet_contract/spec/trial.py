"""The ``trial`` part of a spec: for a short run whose result is compared with those of other runs, as ``ratchet prove`` does."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ratchet_contract.spec.types import SpecModel


class FaultSpec(SpecModel):
    """A fault that a rank, or an agent, injects into its own attempt."""

    attempt: int = Field(ge=1, description="Number of the attempt in which the fault happens.")
    rank: int = Field(ge=0, description="The rank that the fault hits. kill-agent hits the agent of this rank's node.")
    step: int = Field(
        ge=0,
        description="The fault happens after this number of steps of the job. A save that is in progress at that time "
        "is completed first.",
    )
    kind: Literal["kill-rank", "kill-agent", "kill-in-evaluation", "preempt"] = Field(
        description="kill-rank: SIGKILL to the rank when the next step begins. kill-agent: SIGKILL to the agent (the "
        "process that starts the ranks of a node); all its ranks die too. kill-in-evaluation: SIGKILL to "
        "the rank when the evaluation after that step begins. preempt: the job saves and stops, as after a "
        "SIGTERM."
    )


class TrialSpec(SpecModel):
    """Faults and an early end, for a job whose result is only compared with others. The job's total number of steps and its
    schedules do not change."""

    end_at: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Step after which the job saves a checkpoint and ends, if it has not ended before. auto: a few "
        "steps after the last of these events: the first end of an epoch, the first evaluation, the start "
        "of the hook; at the latest after 1000 steps.",
    )
    faults: list[FaultSpec] = Field([], max_length=100, description="Faults to inject, at most one per attempt.")
