"""The jobs of a proof: makes a trial's spec from the user's, waits for the trials, reads their results and deletes their jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from ratchet_client.cli.doctor.progress import Progress
from ratchet_client.cli.shared.signals import signals_ignored
from ratchet_client.resources.client import RatchetClient
from ratchet_contract.api.views import AttemptView, JobView
from ratchet_contract.errors import RatchetError
from ratchet_contract.phases import JobPhase, NoteType

LABEL: Final = "ratchet/prove"
TRACKERS_OFF: Final = {
    "WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": "file:./mlruns", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1", "SWANLAB_MODE": "disabled", "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}  # fmt: skip
"""Variables that keep experiment trackers from sending metrics elsewhere."""
EVERY: Final = 5
"""Steps between checkpoints: two or more steps can be lost after each, and a difference is located to within this many."""
_KEPT_FOR: Final = 86_400.0
"""Seconds after which the service deletes a job of a proof whose command was killed."""
_LOOK: Final = 0.3
_LOG_LINES: Final = 15
_ENDED: Final = f"note.{NoteType.TRIAL_ENDED}"
_CARRIED: Final = f"note.{NoteType.LOOP_VARIABLES}"
_PAUSE: Final = 15.0  # seconds between two progress lines while no phase changes


class TrialFailed(RatchetError):
    """A run of a proof cannot be compared: it failed, did no step of a Session or Task, or ended at another step."""

    code = "trial-failed"


@dataclass(frozen=True)
class Facts:
    """What a trial has passed through. Each step is given as the number of steps done. ``phases``: the first step of each phase
    of the hook. ``epoch_ends``, ``evaluations``: the steps after which an epoch ended or an evaluation was made. ``batches``: the
    largest number of batches in a step. ``epochs``: True if the data have epochs."""

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
    """A trial that has succeeded. ``metrics``: values by name and step. ``carried``: loop variables that no checkpoint
    contains."""

    job: JobView
    facts: Facts
    attempts: list[AttemptView]
    metrics: dict[str, dict[int, float]]
    carried: list[str]

    @property
    def seconds(self) -> float:
        """The seconds from the job's start to its end; 0 if one of them is unknown."""
        job = self.job
        return (
            0.0 if job.ended_at is None or job.started_at is None else (job.ended_at - job.started_at).total_seconds()
        )


def trial_spec(
    spec: Mapping[str, Any], role: str, end_at: int | None, every: int, faults: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a copy of the user's spec, changed to a trial that saves every ``every`` steps and injects ``faults``. ``role``: the
    last part of the trial's name. ``end_at``: the trial's last step; None: it is chosen automatically."""
    out = deepcopy(dict(spec))
    out["name"] = f"{str(spec.get('name', 'job'))[:42].rstrip('-')}-prove-{role}"
    out |= changes(out, role, end_at, every, faults)
    return out


def changes(
    spec: Mapping[str, Any], role: str, end_at: int | None, every: int, faults: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the top-level keys of ``spec`` that a trial changes, except ``name``, with their new values. The arguments are those
    of ``trial_spec``."""
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
    """The jobs of a proof; the context manager ``trials`` creates the object. ``client``: a client of the service that runs the
    jobs. ``say``: a function that prints the current step."""

    def __init__(self, client: RatchetClient, report_progress: Progress) -> None:
        self.client, self.say = client, report_progress
        self._job_ids: list[str] = []
        self._cleanup_actions: list[Callable[[], object]] = []

    def on_cleanup(self, action: Callable[[], object]) -> None:
        """Register an action that ``cleanup`` runs last, even if a job could not be deleted. A ``RatchetError`` that the action
        raises is ignored."""
        self._cleanup_actions.append(action)

    def add(self, job: JobView) -> str:
        """Register a submitted job, so that it is deleted at the end, and return its id."""
        self._job_ids.append(job.id)
        return job.id

    def wait(self, jobs: Mapping[str, str]) -> list[Run]:
        """Block until these jobs (id: description) have ended, and return their runs in the same order. Raise ``TrialFailed`` if
        one does not succeed or did no step of a Session or Task."""
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
                    raise TrialFailed(self._failure_reason(job, words))
            if now != phases or time.monotonic() - said > _PAUSE or sys.stderr.isatty():
                self.say("; ".join(told))
                phases, said = now, time.monotonic()
            time.sleep(_LOOK)
        return [self._read(ended[job_id]) for job_id in jobs]

    def _failure_reason(self, job: JobView, words: str) -> str:
        """Return the error text for a trial that did not succeed, with log lines of rank 0. ``words``: the job's description."""
        lines = [f"{words} is {job.phase} at step {job.progress.step}: {job.message or job.reason}"]
        with suppress(RatchetError):
            lines += [f"  {line.text.rstrip()}" for line in self.client.logs(job.id, rank=0, tail=_LOG_LINES)]
        return "\n".join(lines)

    def _read(self, job: JobView) -> Run:
        """Return the run of a job that has succeeded. Raise ``TrialFailed`` if it did no step of a Session or Task."""
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

    def cleanup(self) -> None:
        """Cancel and delete the registered jobs with their files, except those that do not end within a minute; then run the
        registered actions. May block for minutes. The client's errors are ignored."""
        for job_id in self._job_ids:
            with suppress(RatchetError):
                if not self.client.view(job_id).phase.terminal:
                    self.client.cancel(job_id)
                    self.client.wait(job_id, deadline=60.0)
                self.client.delete(job_id, outputs=True)
        for act in self._cleanup_actions:
            with suppress(RatchetError):
                act()


@contextmanager
def trials(client: RatchetClient, report_progress: Progress) -> Iterator[Trials]:
    """Yield a ``Trials``, and clean up its jobs on exit. Signals are ignored during the clean-up."""
    made = Trials(client, report_progress)
    try:
        yield made
    finally:
        with signals_ignored():
            made.cleanup()


def _variables(notes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the distinct loop variables in ``notes`` as text, like ``best (train.py, line 3)``."""
    # Notes of earlier versions of the worker have no names.
    found = (f"{', '.join(note['names'])} ({note['place']})" for note in notes if "names" in note)
    return list(dict.fromkeys(found))


def _where(job: JobView) -> str:
    """Return the state of a trial as text, for a progress line."""
    if job.phase.terminal:
        return "done"
    if job.phase is JobPhase.QUEUED and 0 < job.attempt <= len((job.spec.get("trial") or {}).get("faults", ())):
        return f"interrupted as planned, starts again, step {job.progress.step}"
    step = f"step {job.progress.step}" if job.progress.step else "no step yet"
    waits = f" ({job.message or job.reason})" if job.phase is JobPhase.QUEUED and job.reason else ""
    return f"{job.phase}{waits}, {step}" + (f", attempt {job.attempt}" if job.attempt > 1 else "")
