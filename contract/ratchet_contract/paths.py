"""Paths of files below the run directory. Nothing here touches the disk. For example:

<home>/jobs/<job id>/checkpoints/step-000000001200.a0007/rank-00000-of-00002.safetensors
<home>/jobs/<job id>/attempts/0007/node-00001/result.json
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MANIFEST_NAME: Final = "MANIFEST.json"
DELETED_MANIFEST_NAME: Final = "MANIFEST.json.deleted"
FINISHED_NAME: Final = (
    "FINISHED"  # empty file in a checkpoint's directory: it was the job's last, which became known after its commit
)
CHANGED_NAME: Final = (
    "CHANGED"  # in that directory: a sentence on what changed after the checkpoint; a resume from it is not exact
)
PINNED_NAME: Final = (
    "PINNED"  # empty file in a checkpoint's directory, made by the service: retention does not delete it
)
VERIFIED_NAME: Final = (
    "VERIFIED"  # empty file in that directory, made by the service: all bytes were correct; the newest such one is kept
)
RUN_DIRECTORY: Final = "ratchet-checkpoints"  # default directory of a Session without a service
RUN_MARK_NAME: Final = "ratchet-run.json"  # file in the directory of a Session without a service: the run's id
_JOB_ID_RE = re.compile(r"job-[0-9a-z]{12}", re.ASCII)
_CHECKPOINT_RE = re.compile(r"step-(\d{12})\.a(\d{4,9})", re.ASCII)
_ATTEMPT_RE = re.compile(r"\d{4}|[1-9]\d{4,8}", re.ASCII)


def is_job_id(text: str) -> bool:
    """True if ``text`` has the form of a job's id."""
    return _JOB_ID_RE.fullmatch(text) is not None


def checkpoint_dir_name(step: int, attempt: int) -> str:
    """Return the name of a checkpoint's directory, ``step-000000001200.a0007``, which is also its id in the API."""
    return f"step-{step:012d}.a{attempt:04d}"


def parse_checkpoint_dir_name(name: str) -> tuple[int, int] | None:
    """Return ``(step, attempt)`` of a checkpoint's directory name; None for any other name."""
    match = _CHECKPOINT_RE.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def parse_attempt_dir_name(name: str) -> int | None:
    """Return the number of an attempt's directory name; None for any other name, also one of more than 9 digits."""
    return int(name) if _ATTEMPT_RE.fullmatch(name) else None


def rank_file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True)
class HomePaths:
    """Paths of the files in ``home``, the run directory of a service."""

    home: Path

    @property
    def instance_id(self) -> str:
        """8 hex digits of the path's SHA-256, which distinguish this run directory from others on the same cluster."""
        return hashlib.sha256(str(self.home).encode()).hexdigest()[:8]

    @property
    def service_file(self) -> Path:
        return self.home / "service.json"

    @property
    def service_log(self) -> Path:
        """File with the output of a service that a command of the client has started in the background."""
        return self.home / "service.log"

    @property
    def service_authorities(self) -> Path:
        """PEM file of the certificate authorities for the service's certificate, written by the service; missing if there are
        none."""
        return self.home / "service-ca.pem"

    @property
    def run_as_file(self) -> Path:
        """File with the user that users' code runs as; empty or missing: the service's own user."""
        return self.home / "run-as"

    @property
    def database(self) -> Path:
        return self.home / "ratchet.db"

    @property
    def reconciler_marker(self) -> Path:
        """Empty file. Its modification time is about that of a reconciler's last successful pass."""
        return self.home / "reconciler.mark"

    @property
    def database_reserve(self) -> Path:
        """File that reserves disk space; removed if the disk is full, so that SQLite can record a job's deletion."""
        return self.home / "ratchet.reserve"

    @property
    def code(self) -> Path:
        return self.home / "code"

    @property
    def environments(self) -> Path:
        """Directory with the environments of jobs, below one directory for each user that jobs run as."""
        return self.home / "environments"

    @property
    def runs(self) -> Path:
        """Directory with the run directories of the private services that ``ratchet run`` starts, one for each job."""
        return self.home / "run"

    @property
    def jobs(self) -> Path:
        return self.home / "jobs"

    def job(self, job_id: str) -> JobPaths:
        return JobPaths(self.jobs / job_id)


@dataclass(frozen=True)
class JobPaths:
    """Paths of one job's files, in the directory ``root``. A run without a service has the same layout."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def adopted(self) -> JobPaths:
        """Paths of the files that the service has copied from the run without a service that the job has adopted; missing for
        other jobs."""
        return JobPaths(self.root / "adopted")

    @property
    def work_dir(self) -> Path:
        return self.root / "work"

    @property
    def work_file(self) -> Path:
        """JSON file that lists the files of the code that were copied to ``work_dir``, with digests. Written by agents."""
        return self.root / "work.json"

    @property
    def framework_files(self) -> Path:
        """File that records the checkpoint files that Lightning's own callbacks wrote or removed, and at which step."""
        return self.root / "framework-files.jsonl"

    @property
    def kept_marker(self) -> Path:
        """File with the owner of a deleted job. It exists only if the job's outputs were kept."""
        return self.root / "KEPT"

    def checkpoint(self, step: int, attempt: int) -> Path:
        return self.checkpoints / checkpoint_dir_name(step, attempt)

    def attempt(self, attempt: int) -> AttemptPaths:
        return AttemptPaths(self.root / "attempts" / f"{attempt:04d}")


@dataclass(frozen=True)
class NodePaths:
    """Paths of the files of one node's agent in one attempt."""

    root: Path

    @property
    def lock_file(self) -> Path:
        """File that the agent locks with ``flock`` while it lives: a proof of life."""
        return self.root / "agent.lock"

    @property
    def agent_file(self) -> Path:
        """``AgentFile`` as JSON: pid, start time and host of the agent."""
        return self.root / "agent.json"

    @property
    def agent_log(self) -> Path:
        return self.root / "agent.log"

    @property
    def control_file(self) -> Path:
        """``Control`` as JSON: the desired state of the node's ranks. Written by the agent, polled by the ranks."""
        return self.root / "control.json"

    @property
    def result_file(self) -> Path:
        """``AttemptResult`` as JSON: how the attempt ended on this node; missing before, or if the agent could not write it."""
        return self.root / "result.json"

    @property
    def environment_log(self) -> Path:
        """File with the output of pip, if the attempt has built an environment on this node."""
        return self.root / "environment.log"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"


@dataclass(frozen=True)
class AttemptPaths(NodePaths):
    """Paths of the files of one attempt: those that all nodes share, and those of node 0's agent."""

    def node(self, node: int) -> NodePaths:
        """Return the paths of the agent's files on one node; for node 0 this object itself."""
        return NodePaths(self.root / f"node-{node:05d}") if node else self

    @property
    def launch_file(self) -> Path:
        """``LaunchFile`` as JSON: the task of the agents. Written by the launcher, with mode 0600, or by a run without a
        service."""
        return self.root / "launch.json"

    @property
    def fence_file(self) -> Path:
        """Empty file, written by the service to end the attempt: its agents then end, and its ranks commit no checkpoint."""
        return self.root / "FENCED"

    @property
    def engine_log(self) -> Path:
        """File with the output of the engine itself, if it writes one (Slurm does)."""
        return self.root / "engine.log"

    @property
    def base_file(self) -> Path:
        """``Base`` as JSON: the checkpoint that this attempt continues from. Written and synced by rank 0 before it trains."""
        return self.root / "base.json"

    @property
    def environment_file(self) -> Path:
        """``EnvironmentView`` as JSON: the packages of rank 0's interpreter and the code's commit."""
        return self.root / "environment.json"

    @property
    def imports_file(self) -> Path:
        """Names of the installed packages' modules that rank 0 has imported, one a line; only where agents are parked."""
        return self.root / "imports.txt"

    def log(self, rank: int) -> Path:
        return self.root / "logs" / f"rank-{rank:05d}.log"

    def counter(self, rank: int) -> Path:
        return self.root / "counters" / f"rank-{rank:05d}.bin"

    def ring(self, rank: int) -> Path:
        """File with the fingerprints of the rank's newest steps (``step_ring``)."""
        return self.root / "fingerprints" / f"rank-{rank:05d}.bin"

    def spool(self, rank: int) -> Path:
        """File of the rank's messages: a ``RankMessage`` as JSON per line. A line's number, from 1, is the sequence number."""
        return self.root / "spool" / f"rank-{rank:05d}.jsonl"

    @property
    def agent_spool(self) -> Path:
        """Spool of node 0's agent itself (``AGENT_RANK``), in the format of a rank's spool."""
        return self.root / "spool" / "agent.jsonl"

    def node_spool(self, node: int) -> Path:
        """Spool of the agent of one node. The messages have ``node_rank(node)`` as their ``rank``."""
        return self.root / "spool" / f"node-{node:05d}.jsonl"

    def log_times(self, rank: int) -> Path:
        """File with the sizes of a rank's log over time (``log_index``); the log's lines get their times from it."""
        return self.log(rank).with_suffix(".times")

    @property
    def fetch_notes_file(self) -> Path:
        """JSON list of sentences on what node 0's agent fetched from the object store before the ranks started."""
        return self.root / "fetched.json"

    def rank_result(self, rank: int) -> Path:
        """``RankResult`` as JSON: how the rank ended; missing before, or if the rank could not write it."""
        return self.root / "results" / f"rank-{rank:05d}.json"
