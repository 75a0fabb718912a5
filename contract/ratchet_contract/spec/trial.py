"""The ``trial`` part of a spec: a short run that is compared with others, as ``ratchet prove`` makes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ratchet_contract.spec.types import SpecModel


class FaultSpec(SpecModel):
    """A fault that a rank, or an agent, injects into its own attempt."""

    attempt: int = Field(ge=1, description="Number of the attempt in which it happens.")
    rank: int = Field(ge=0, description="The affected rank; for kill-agent, the agent of its node.")
    step: int = Field(ge=0, description="It happens after this many steps of the job, after the saves begun by then.")
    kind: Literal["kill-rank", "kill-agent", "kill-in-evaluation", "preempt"] = Field(
        description="kill-rank: SIGKILL of the rank, as the next step begins; kill-agent: of its node's agent, with all its "
        "ranks; kill-in-evaluation: of the rank, as the evaluation after that step begins; preempt: a stop as by SIGTERM."
    )


class TrialSpec(SpecModel):
    """Faults and an early end, for a job whose result is only compared with others. The job's total number of steps and its
    schedules do not change."""

    end_at: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Step after which the job ends, with a checkpoint, unless it ends before. auto: a few steps after the "
        "first end of an epoch, the first evaluation and the start of the hook, 1000 at most.",
    )
    faults: list[FaultSpec] = Field([], max_length=100, description="At most one per attempt.")
