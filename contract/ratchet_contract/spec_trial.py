"""The ``trial`` part of a spec: a short run that is compared with others, as ``ratchet prove`` makes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ratchet_contract.spec_base import SpecModel


class FaultSpec(SpecModel):
    """What the ranks, or an agent, do to their own attempt."""

    attempt: int = Field(ge=1, description="Number of the attempt that it strikes.")
    rank: int = Field(ge=0, description="The rank that it strikes, or whose node's agent.")
    step: int = Field(
        ge=0, description="It strikes when so many steps of the job are done, behind the saves begun by then."
    )
    kind: Literal["kill-rank", "kill-agent", "kill-in-evaluation", "preempt"] = Field(
        description="kill-rank: SIGKILL of the rank, as the next step begins; kill-agent: of its node's agent, with all its "
        "ranks; kill-in-evaluation: of the rank, as the evaluation behind that step begins; preempt: a stop as by SIGTERM."
    )


class TrialSpec(SpecModel):
    """Faults and an early end, for a job whose result nobody wants but to compare it. Total and schedules stay the job's own."""

    end_at: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Step after which the job ends, with a checkpoint, unless it ends before. auto: a few steps behind the first "
        "end of an epoch, the first evaluation and the start of the hook, 1000 at most.",
    )
    faults: list[FaultSpec] = Field([], max_length=100, description="At most one of each attempt.")
