"""Bodies of the REST API about all jobs together."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from ratchet_contract.api.views import GoodputView, View
from ratchet_contract.phases import Cause, JobPhase

ResumeKind = Literal["exact-proved", "exact", "not-exact", "differs"]
ParkedObstacle = Literal["memory-short", "too-large", "ended", "not-started", "relative-pythonpath"]


class SlotHolderView(View):
    """A node of a job's attempt that holds slots."""

    job_id: str
    name: str
    owner: str
    count: int
    devices: list[int] = Field(description="Indices of the GPUs, or numbers of the CPU slots.")


class SlotsView(View):
    """The slots of one kind that the launcher `local` lends to jobs."""

    kind: Literal["cpu", "gpu"]
    capacity: int | None = Field(
        None, description="null: the machine that trains has not reported it, or runs no jobs."
    )
    holders: list[SlotHolderView]


class OwnerUseView(View):
    """What an owner's jobs hold now, and have used in the window."""

    owner: str
    running: int = Field(description="Jobs with an attempt that has not ended; the next two fields are of these.")
    ranks: int
    gpus: int
    gpu_hours: float = Field(description="Hours since the start of each attempt within the window, times its GPUs.")
    rank_hours: float = Field(description="As `gpu_hours`, times the ranks of attempts without a GPU.")


class HostEndsView(View):
    """Ends of attempts that had a node on this host, also if another host caused the end."""

    host: str
    failures: int = Field(description="Ends by a cause of outcome failed or lost, or by node-lost.")
    ends: dict[Cause, int]
    faults: dict[str, int] = Field({}, description="Ends that this host caused by what may be its hardware, by kind.")
    excluded_by: list[str] = Field([], description="Jobs with an attempt that stays away from it; not ended.")


class ParkedView(View):
    """The parked agents of the launcher `local`, and the bounds that `--standby` sets."""

    ready: int = Field(description="Those with all imports made.")
    starting: int
    memory_bytes: int = Field(description="Resident size of their processes; pages that several share count in part.")
    max_agents: int = Field(default=0, description="Largest number of parked agents. 0: `--standby off`.")
    max_seconds: float = Field(default=0.0, description="Seconds that one waits after the last attempt of its kind.")
    max_memory_bytes: int = Field(default=0, description="Largest memory of one.")
    obstacles: list[ParkedObstacle] = Field(
        default=[],
        description="Why no agent is parked for the next attempts of some kind. memory-short: less than twice "
        "`max_memory_bytes` was available; looked at again after a minute. "
        "too-large: one used more than that. ended: one has ended during its imports. "
        "not-started: the system refused the process. "
        "relative-pythonpath: the service was started with a relative directory in PYTHONPATH.",
    )


class FleetView(View):
    """What all jobs together do, and what became of the attempts that have ended in the window."""

    since: datetime = Field(description="Begin of the window.")
    jobs: dict[JobPhase, int]
    slots: list[SlotsView]
    parked: ParkedView | None = Field(
        None, description="null: this process starts no agents on its machine, such as one without a reconciler."
    )
    ends: dict[Cause, int] = Field(description="Ends of attempts in the window, by cause.")
    hosts: list[HostEndsView] = Field(description="The 50 hosts with most failures, these first.")
    owners: list[OwnerUseView]
    goodput: GoodputView = Field(
        description="Sums over the whole time of the attempts that have ended in the window or still run. The share is of the "
        "time without `unseen_seconds`."
    )
    resumes: dict[ResumeKind, int] = Field(
        description="Number of these attempts that resumed from a checkpoint, by the verdict of the resume report. exact-proved: "
        "redone steps have proved it. differs: a redone step differs."
    )
    attempts: int = Field(description="Number of attempts in `goodput`, `resumes` and the hours of `owners`.")
    attempts_left_out: int = Field(
        description="Number of attempts that have ended in the window, but are left out there: the oldest beyond 5000."
    )
