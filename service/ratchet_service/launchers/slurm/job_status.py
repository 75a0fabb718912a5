"""What Ratchet concludes from Slurm's states and reasons of a job. Pure.

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

_ENDED_STATES: Final = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
        "TIMEOUT",
    }
)  # fmt: skip
_QUEUED: Final = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
_UNSTARTABLE_REASONS: Final = frozenset(
    {
        "AccountNotAllowed", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS", "JobArrayTaskLimit",
        "JobLaunchFailure", "PartitionConfig", "PartitionTimeLimit", "QOSNotAllowed", "ReservationDeleted",
        "ReservationInvalid", "launch_failed_requeued_held",
    }
)  # fmt: skip
"""Without PartitionNodeLimit, which may only mean that nodes are down or drained."""
_PER_JOB: Final = re.compile(r"(Assoc|QOS)\w*(PerJob(Limit)?|MinCpuNotSatisfied|MinGRES|WallDurationPerJobLimit)")
_HELD: Final = {"JobHeldUser": "its owner", "JobHeldAdmin": "an administrator"}
_ENDED_TASKS: Final = re.compile(r"srun: error: \S+: tasks? (\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*): (.+)")
_LEASE_LOST_MESSAGE: Final = f"Exited with exit code {EXIT_LEASE_LOST}"
_SHELL_SIGNAL: Final = 128


@dataclass(frozen=True)
class JobRecord:
    """One batch job as Slurm reports it. ``completing``: its last processes are being ended. ``exit_code``, ``signal``: the
    script's. ``restarts``: how often Slurm requeued it. ``preempted``: it had to make room."""

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
    def has_ended(self) -> bool:
        """True if no part of the job runs or will start, as far as Slurm knows."""
        return self.state in _ENDED_STATES and not self.completing

    @property
    def is_queued(self) -> bool:
        """True if the job is in Slurm's queue, or its nodes are being prepared."""
        return self.state in _QUEUED

    @property
    def was_requeued(self) -> bool:
        """True if Slurm has requeued the job and it has not ended since."""
        return self.restarts > 0 and not self.has_ended


def decode_wait_status(status: int) -> tuple[int, int]:
    """Return exit code and signal of a raw wait(2) status; the one that does not apply is 0."""
    if os.WIFSIGNALED(status):
        return 0, os.WTERMSIG(status)
    return os.waitstatus_to_exitcode(status), 0


def duplicate_jobs(jobs: Sequence[JobRecord]) -> list[JobRecord]:
    """Return the jobs that certainly do not run the attempt, if it was submitted more than once. ``jobs``: all jobs of the
    attempt, sorted by id."""
    began = [job for job in jobs if job.nodes and not job.is_queued]
    first = next(iter(began or jobs), None)
    return [
        job
        for job in jobs
        if job is not first and (job not in began or (job.has_ended and job.exit_code == EXIT_LEASE_LOST))
    ]


def waiting_reason(job: JobRecord) -> str | None:
    """Return why Slurm has not started the job yet, as a message; None if it has, or never will."""
    if not job.is_queued or unstartable_reason(job) is not None:
        return None
    if job.state == "CONFIGURING":
        return f"Slurm prepares the nodes of job {job.id}"
    if job.reason in _HELD:
        return (
            f"Slurm job {job.id} is held by {_HELD[job.reason]} ({job.reason}): `scontrol release {job.id}` releases it"
        )
    return f"Slurm job {job.id} waits: {job.reason or 'no reason given yet'}"


def unstartable_reason(job: JobRecord) -> str | None:
    """Return why the job can never start as it was requested; None while it may, or if it has started."""
    reason = job.reason.strip("()").replace(" ", "_")
    if job.state == "PENDING" and (reason in _UNSTARTABLE_REASONS or _PER_JOB.fullmatch(reason)):
        return (
            f"Slurm will never start job {job.id} as it is: {job.reason}; compare launcher, resources and world of the spec with "
            "`scontrol show partition` and your account's limits"
        )
    return None


def engine_end(job: JobRecord, *, started: bool, has_results: bool) -> EngineEnd | None:
    """Return why the job ended or cannot run, according to Slurm; None if there is no such reason. ``started``: an agent was
    seen. ``has_results``: all agents have left one."""
    where = f" (nodes {job.nodes})" if job.nodes else ""
    if job.restarts:
        return EngineEnd(
            Cause.SIGTERM, f"Slurm requeued job {job.id}: it was cancelled, since only Ratchet restarts attempts"
        )
    if not job.has_ended:
        return _end_of_unstartable(job)
    said = {
        "PREEMPTED": (Cause.HIGHER_PRIORITY, "was preempted by a job of higher priority"),
        "TIMEOUT": (Cause.TIME_LIMIT, "reached its time limit"),
        "DEADLINE": (Cause.TIME_LIMIT, "could not end before its deadline"),
        "NODE_FAIL": (
            Cause.NODE_LOST,
            f"lost a node{where}; processes that still run there are fenced: their reports are refused",
        ),
        "BOOT_FAIL": (Cause.NODE_LOST, f"got a node that did not boot{where}"),
        "OUT_OF_MEMORY": (Cause.OOM, "ran out of memory: request more (resources.memory)"),
        "CANCELLED": (Cause.SIGTERM, "was cancelled (scancel, by its owner or an administrator)"),
        "REVOKED": (Cause.LAUNCHER_ERROR, "was revoked: another cluster of the federation started it"),
    }.get(job.state)
    if job.preempted and job.state in ("CANCELLED", "FAILED", "COMPLETED"):
        said = (Cause.HIGHER_PRIORITY, "made room for a job of higher priority")
    if said is not None:
        return EngineEnd(said[0], f"Slurm job {job.id} {said[1]}")
    return None if has_results else _end_by_exit_code(job, started)


def ended_tasks(log: str, nodes: int) -> dict[int, str]:
    """Return node -> srun's message, for nodes whose agent has ended with an error other than a lost lease. ``log``: srun's
    output. ``nodes``: their number."""
    found: dict[int, str] = {}
    for numbers, how in _ENDED_TASKS.findall(log):
        # another agent runs this one's part of the attempt, and its end implies nothing about that agent
        if how.strip() == _LEASE_LOST_MESSAGE:
            continue
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            found |= dict.fromkeys(range(int(first), min(int(last or first) + 1, nodes)), how.strip())
    return found


def _end_of_unstartable(job: JobRecord) -> EngineEnd | None:
    """Return the end of a job that can never start; None if it may."""
    stuck = unstartable_reason(job)
    return None if stuck is None else EngineEnd(Cause.LAUNCHER_ERROR, stuck)


def _end_by_exit_code(job: JobRecord, started: bool) -> EngineEnd | None:
    """Return the end that the script's exit code or signal implies; None if the state is not FAILED. ``started``: an agent was
    seen."""
    if job.state != "FAILED":
        return None
    if job.signal:
        return EngineEnd(Cause.UNKNOWN, f"the script of Slurm job {job.id} was killed by signal {job.signal}")
    cause = CAUSE_OF_EXIT_CODE.get(job.exit_code)
    if started and cause is not None and job.exit_code != EXIT_COMPLETED:
        return EngineEnd(cause, f"Slurm job {job.id} ended with exit code {job.exit_code}")
    if job.exit_code > _SHELL_SIGNAL:
        return EngineEnd(
            Cause.UNKNOWN, f"an agent of Slurm job {job.id} was killed by signal {job.exit_code - _SHELL_SIGNAL}"
        )
    reason = f" ({job.reason})" if job.reason not in ("", "None", "NonZeroExitCode") else ""
    return EngineEnd(Cause.LAUNCHER_ERROR, f"Slurm job {job.id} ended with exit code {job.exit_code}{reason}")
