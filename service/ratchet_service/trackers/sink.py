"""What an experiment tracker gets of a job. The exporter decides which points are sent, and stores each sink's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol

State = Mapping[str, Any]
"""What a sink must remember of one run, as JSON values: stored in the same transaction as the position of the export. ``url`` or
``path``, if present, is shown to users as the place of the run."""


class TrackerError(Exception):
    """A tracker did not accept a batch. The exporter tries the same batch again later. The message names the tracker, the cause
    and the cure."""


@dataclass(frozen=True)
class Run:
    """A run in a tracker. ``number``: 1, or more after a branch (``from_step``, or a redone step that differs); ``parent``: name
    of the run that it branched from, or that of the job it was forked from. ``parameters``: spec, git commit and environment,
    flattened to text. ``experiment``: MLflow's experiment and W&B's project."""

    job_id: str
    number: int
    job_name: str
    owner: str
    experiment: str
    labels: Mapping[str, str]
    parameters: Mapping[str, str]
    created_at: datetime
    parent: str | None = None

    @property
    def name(self) -> str:
        """Unique name of the run: the job's id; that of a later run ends with its number."""
        return name_of(self.job_id, self.number)


def name_of(job_id: str, number: int) -> str:
    """Return the name of a job's run."""
    return job_id if number == 1 else f"{job_id}-{number}"


class Point(NamedTuple):
    """A value of a series. ``value`` may be NaN or infinite. ``at``: when the script logged it."""

    name: str
    step: int
    value: float
    at: datetime


class Note(NamedTuple):
    """A text at a step, such as the end of an attempt with its cause. ``id``: unique in the run, increasing."""

    id: int
    step: int
    at: datetime
    text: str


@dataclass(frozen=True)
class End:
    """The end of a job. ``status``: the job's last phase, such as SUCCEEDED. ``summary``: goodput and other figures of the whole
    job. ``checkpoint``: place of the last checkpoint, None without one."""

    status: str
    at: datetime
    summary: Mapping[str, float]
    checkpoint: str | None


@dataclass(frozen=True)
class Batch:
    """What is sent at once: points in the order of their steps (within one series each step once, increasing over all batches of
    the run), notes, and the end if this is the run's last batch. ``last``: False if another batch follows at once."""

    points: Sequence[Point]
    notes: Sequence[Note]
    end: End | None
    last: bool = True


class Sink(Protocol):
    """A tracker. ``export`` creates the run if ``state`` is empty, sends the batch, and returns the new state once the tracker
    has stored it. After a crash the exporter repeats a call with the same arguments: the tracker must then have each point once.
    Raises ``TrackerError``."""

    name: str

    def export(self, run: Run, state: State, batch: Batch) -> State: ...
