"""Slurm's words about a job -> what Ratchet concludes. Pure.

States and reasons: squeue(1), "JOB STATE CODES" and "JOB REASON CODES".
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE, EXIT_COMPLETED, EXIT_LEASE_LOST
from ratchet_contract.phases import Cause
from ratchet_service.launchers.base import EngineEnd

_OVER: Final = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
        "TIMEOUT",
    }
)  # fmt: skip
_QUEUED: Final = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
_HOPELESS: Final = frozenset(
    {
        "AccountNotAllowed", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS", "JobArrayTaskLimit",
        "JobLaunchFailure", "PartitionConfig", "PartitionTimeLimit", "QOSNotAllowed", "ReservationDeleted",
        "ReservationInvalid", "launch_failed_requeued_held",
    }
)  # fmt: skip
"""Not PartitionNodeLimit: it may only say that nodes are down or drained."""
_PER_JOB: Final = re.compile(r"(Assoc|QOS)\w*(PerJob(Limit)?|MinCpuNotSatisfied|MinGRES|WallDurationPerJobLimit)")
_HELD: Final = {"JobHeldUser": "its owner", "JobHeldAdmin": "an administrator"}
_ENDED_TASKS: Final = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+)")
_NOT_OURS: Final = f"Exited with exit code {EXIT_LEASE_LOST}"
_SHELL_SIGNAL: Final = 128


@dataclass(frozen=True)
class JobRecord:
    """One batch job as Slurm tells of it. ``exit_code``: of the script; ``signal``: what ended it; ``restarts``: how often Slurm
    started it anew by itself; ``preempted``: it was asked to make room for another."""

    id: int
    name: str
    state: str
    reason: str = ""
    comment: str = ""
    completing: bool = False
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    preempted: bool = False
    nodes: str = ""

    @property
    def over(self) -> bool:
        """Nothing of it runs or will start, as far as Slurm knows. A state of a version to come counts as not over."""
        return self.state in _OVER and not self.completing

    @property
    def queued(self) -> bool:
        return self.state in _QUEUED

    @property
    def requeued(self) -> bool:
        """It is queued once more though its script forbids it (an administrator allowed it)."""
        return self.restarts > 0 and not self.over


def exit_status(status: int) -> tuple[int, int]:
    """Exit code and signal of a raw status as wait(2) gives it, which squeue prints."""
    if os.WIFSIGNALED(status):
        return 0, os.WTERMSIG(status)
    return os.waitstatus_to_exitcode(status), 0


def idle(jobs: Sequence[JobRecord]) -> list[JobRecord]:
    """Of several jobs of one name, which is one attempt submitted again after Slurm's answer was lost: those that do nothing of
    it. Its agents are those that came first."""
    began = [job for job in jobs if job.nodes and not job.queued]
    first = next(iter(began or jobs), None)
    return [
        job
        for job in jobs
        if job is not first and (job not in began or (job.over and job.exit_code == EXIT_LEASE_LOST))
    ]


def waiting(job: JobRecord) -> str | None:
    """Why Slurm has not started it, for people; None when it has, or never will."""
    if not job.queued or hopeless(job) is not None:
        return None
    if job.state == "CONFIGURING":
        return f"Slurm prepares the nodes of job {job.id}"
    if job.reason in _HELD:
        return (
            f"Slurm job {job.id} is held by {_HELD[job.reason]} ({job.reason}): `scontrol release {job.id}` lets it go"
        )
    return f"Slurm job {job.id} waits: {job.reason or 'no reason given yet'}"


def hopeless(job: JobRecord) -> str | None:
    """Why it will never start as it was asked for; None while it may."""
    reason = job.reason.strip("()").replace(" ", "_")
    if job.state == "PENDING" and (reason in _HOPELESS or _PER_JOB.fullmatch(reason)):
        return (
            f"Slurm will never start job {job.id} as it is: {job.reason}; compare launcher, resources and world of the spec with "
            "`scontrol show partition` and your account's limits"
        )
    return None


def end(job: JobRecord, *, begun: bool, told: bool) -> EngineEnd | None:
    """What Slurm knows of the end; None where there is none, or nothing beside the agents' own results. ``begun``: any agent was
    seen; ``told``: all have left a result."""
    where = f" (nodes {job.nodes})" if job.nodes else ""
    if job.restarts:
        return EngineEnd(
            Cause.SIGTERM, f"Slurm requeued job {job.id} by itself: restarts belong to Ratchet, it was cancelled"
        )
    if not job.over:
        return _on_the_way(job)
    said = {
        "PREEMPTED": (Cause.HIGHER_PRIORITY, "was preempted by a job of higher priority"),
        "TIMEOUT": (Cause.TIME_LIMIT, "reached its time limit"),
        "DEADLINE": (Cause.TIME_LIMIT, "could not end before its deadline"),
        "NODE_FAIL": (Cause.NODE_LOST, f"lost a node{where}; what still runs there is fenced: its reports are refused"),
        "BOOT_FAIL": (Cause.NODE_LOST, f"got a node that did not boot{where}"),
        "OUT_OF_MEMORY": (Cause.OOM, "was out of memory: ask for more (resources.memory)"),
        "CANCELLED": (Cause.SIGTERM, "was cancelled (scancel, by its owner or an administrator)"),
        "REVOKED": (Cause.LAUNCHER_ERROR, "was revoked: another cluster of the federation started it"),
    }.get(job.state)
    if job.preempted and job.state in ("CANCELLED", "FAILED", "COMPLETED"):
        said = (Cause.HIGHER_PRIORITY, "made room for a job of higher priority")
    if said is not None:
        return EngineEnd(said[0], f"Slurm job {job.id} {said[1]}")
    return None if told else _by_exit_code(job, begun)


def ended_tasks(log: str) -> dict[int, str]:
    """Nodes whose agent is no more, and how srun tells of it, from what srun printed. Of a success it tells nothing.
    An agent that found its part of the attempt run by another (a job submitted twice) says nothing of that one."""
    found: dict[int, str] = {}
    for numbers, how in _ENDED_TASKS.findall(log):
        if how.strip() == _NOT_OURS:
            continue
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), how.strip())
    return found


def _on_the_way(job: JobRecord) -> EngineEnd | None:
    stuck = hopeless(job)
    return None if stuck is None else EngineEnd(Cause.LAUNCHER_ERROR, stuck)


def _by_exit_code(job: JobRecord, begun: bool) -> EngineEnd | None:
    """The script ends as its srun does, that with the highest code of all agents; 128 and more stands for a signal."""
    if job.state != "FAILED":
        return None
    if job.signal:
        return EngineEnd(Cause.UNKNOWN, f"the script of Slurm job {job.id} was killed by signal {job.signal}")
    cause = CAUSE_OF_EXIT_CODE.get(job.exit_code)
    if begun and cause is not None and job.exit_code != EXIT_COMPLETED:
        return EngineEnd(cause, f"Slurm job {job.id} ended with exit code {job.exit_code}")
    if job.exit_code > _SHELL_SIGNAL:
        return EngineEnd(
            Cause.UNKNOWN, f"an agent of Slurm job {job.id} was killed by signal {job.exit_code - _SHELL_SIGNAL}"
        )
    reason = f" ({job.reason})" if job.reason not in ("", "None", "NonZeroExitCode") else ""
    return EngineEnd(Cause.LAUNCHER_ERROR, f"Slurm job {job.id} ended with exit code {job.exit_code}{reason}")
