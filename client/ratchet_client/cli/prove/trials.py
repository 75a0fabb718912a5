"""The jobs of a proof: the user's spec as a trial (an early end, faults, no trackers), submitted, watched, read, deleted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from ratchet_client.cli.doctor.progress import Progress
from ratchet_client.cli.signals import undisturbed
from ratchet_client.client import RatchetClient
from ratchet_contract.api import AttemptView, JobView
from ratchet_contract.errors import RatchetError
from ratchet_contract.phases import JobPhase

LABEL: Final = "ratchet/prove"
TRACKERS_OFF: Final = {
    "WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": "file:./mlruns", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1", "SWANLAB_MODE": "disabled", "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}  # fmt: skip
"""Variables by which the packages that send figures elsewhere keep still."""
EVERY: Final = 5
"""Steps between checkpoints: two or more of them can be lost behind each, and a difference is found within as many."""
_KEPT_FOR: Final = 86_400.0
"""Seconds after which the service deletes a job of a proof whose command was killed."""
_LOOK: Final = 0.3
_LOG_LINES: Final = 15
_ENDED: Final = "note.trial-ended"
_CARRIED: Final = "note.loop-variables"
_PAUSE: Final = 15.0  # seconds between two lines that tell of steps alone


class TrialFailed(RatchetError):
    """A run did not come to its end."""

    code = "trial-failed"


@dataclass(frozen=True)
class Facts:
    """What a trial has come by (the event ``trial-ended``), in numbers of steps that were done then. ``phases``: of the hook,
    with the first step of each; ``schedulers``: how often each was stepped; ``epochs``: has it data with epochs?"""

    step: int
    total: int | None
    phases: Mapping[str, int]
    epoch_ends: list[int]
    evaluations: list[int]
    expects_evaluation: bool
    batches: int
    schedulers: Mapping[str, int]
    epochs: bool


@dataclass(frozen=True)
class Run:
    """A trial that has ended well. ``metrics``: values by name and step; ``carried``: loops' variables that no checkpoint has."""

    job: JobView
    facts: Facts
    attempts: list[AttemptView]
    metrics: dict[str, dict[int, float]]
    carried: list[str]

    @property
    def seconds(self) -> float:
        job = self.job
        return (
            0.0 if job.ended_at is None or job.started_at is None else (job.ended_at - job.started_at).total_seconds()
        )


def trial_spec(
    spec: Mapping[str, Any], role: str, end_at: int | None, every: int, faults: list[dict[str, Any]]
) -> dict[str, Any]:
    """The user's spec, but for what a trial must not have: it ends early, strikes itself, keeps its files in the job's own
    directories, and goes when it is old."""
    out = deepcopy(dict(spec))
    out["name"] = f"{str(spec.get('name', 'job'))[:42].rstrip('-')}-prove-{role}"
    out |= changes(out, role, end_at, every, faults)
    return out


def changes(
    spec: Mapping[str, Any], role: str, end_at: int | None, every: int, faults: list[dict[str, Any]]
) -> dict[str, Any]:
    """The parts of ``spec`` that a trial has otherwise, whole."""
    checkpoint = {
        k: v for k, v in (spec.get("checkpoint") or {}).items() if k not in ("every_seconds", "keep_best", "uri")
    }
    return {
        "labels": {**(spec.get("labels") or {}), LABEL: role},
        "env": {**(spec.get("env") or {}), **TRACKERS_OFF},
        "checkpoint": {**checkpoint, "every_steps": every, "first": "off", "keep_last": 10, "when_busy": "wait"},
        "policy": {
            **(spec.get("policy") or {}),
            "max_failures": len(faults) + 3,
            "max_preemptions": None,
            "backoff": 0.1,
            "timeout": None,
        },
        "ttl": _KEPT_FOR,
        "ttl_outputs": True,
        "trial": {"end_at": "auto" if end_at is None else end_at, "faults": faults},
    }


class Trials:
    """Submits jobs and forgets none: what was made is cancelled and deleted when the block is left."""

    def __init__(self, client: RatchetClient, say: Progress) -> None:
        self.client, self.say = client, say
        self._made: list[str] = []
        self._later: list[Callable[[], object]] = []

    def later(self, act: Callable[[], object]) -> None:
        """To be done once all jobs are gone."""
        self._later.append(act)

    def add(self, job: JobView) -> str:
        self._made.append(job.id)
        return job.id

    def wait(self, jobs: Mapping[str, str]) -> list[Run]:
        """The runs of these jobs (id: what each is, in words), once all have ended. Raises ``TrialFailed``."""
        ended: dict[str, JobView] = {}
        phases, said = "", 0.0
        while len(ended) < len(jobs):
            told, now = [], ""
            for job_id, words in jobs.items():
                job = ended.get(job_id) or self.client.view(job_id)
                if job.phase.terminal:
                    ended[job_id] = job
                told.append(f"{words}: {_where(job)}")
                now += f"{job.phase} {job.attempt} "
                if job.phase.terminal and job.phase is not JobPhase.SUCCEEDED:
                    raise TrialFailed(self._why(job, words))
            if now != phases or time.monotonic() - said > _PAUSE or sys.stderr.isatty():
                self.say("; ".join(told))
                phases, said = now, time.monotonic()
            time.sleep(_LOOK)
        return [self._read(ended[job_id]) for job_id in jobs]

    def _why(self, job: JobView, words: str) -> str:
        lines = [f"{words} is {job.phase} at step {job.progress.step}: {job.message or job.reason}"]
        with suppress(RatchetError):
            lines += [f"  {line.text.rstrip()}" for line in self.client.logs(job.id, rank=0, tail=_LOG_LINES)]
        return "\n".join(lines)

    def _read(self, job: JobView) -> Run:
        events = list(self.client.events(job.id))
        facts = next((e.data["data"] for e in events if e.type == _ENDED), None)
        if facts is None:
            raise TrialFailed(
                f"job {job.id} ended without a step of a Session: a proof needs a Session or a Task (docs/adoption.md)"
            )
        series = self.client.series(job.id)
        return Run(
            job,
            Facts(**facts),
            self.client.attempts(job.id),
            {name: dict(zip(found.steps, found.values, strict=True)) for name, found in series.items()},
            _variables(e.data["data"] for e in events if e.type == _CARRIED),
        )

    def forget(self) -> None:
        for job_id in self._made:
            with suppress(RatchetError):
                if not self.client.view(job_id).phase.terminal:
                    self.client.cancel(job_id)
                    self.client.wait(job_id, deadline=60.0)
                self.client.delete(job_id, outputs=True)
        for act in self._later:
            with suppress(RatchetError):
                act()


@contextmanager
def trials(client: RatchetClient, say: Progress) -> Iterator[Trials]:
    """Jobs that are gone afterwards, whatever happens."""
    made = Trials(client, say)
    try:
        yield made
    finally:
        with undisturbed():
            made.forget()


def _variables(notes: Iterable[Mapping[str, Any]]) -> list[str]:
    """``best (train.py, line 3)``. An earlier version of the worker gives none."""
    found = (f"{', '.join(note['names'])} ({note['place']})" for note in notes if "names" in note)
    return list(dict.fromkeys(found))


def _where(job: JobView) -> str:
    if job.phase.terminal:
        return "done"
    if job.phase is JobPhase.QUEUED and 0 < job.attempt <= len((job.spec.get("trial") or {}).get("faults", ())):
        return f"interrupted as planned, starts again, step {job.progress.step}"
    step = f"step {job.progress.step}" if job.progress.step else "no step yet"
    waits = f" ({job.message or job.reason})" if job.phase is JobPhase.QUEUED and job.reason else ""
    return f"{job.phase}{waits}, {step}" + (f", attempt {job.attempt}" if job.attempt > 1 else "")
