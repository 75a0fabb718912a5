"""``Job``: what the client's ``submit``, ``fork`` and ``job`` return."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from ratchet_client.resources.job_files import Fetched
from ratchet_client.resources.poll import TERMINAL, Series, Snapshot, WhichAttempt
from ratchet_contract.api import views
from ratchet_contract.api.view_text import html_table
from ratchet_contract.errors import NotFound
from ratchet_contract.phases import JobPhase

if TYPE_CHECKING:
    from ratchet_client.resources.client import RatchetClient
    from ratchet_client.resources.export_download import ExportFormat
    from ratchet_contract.api.requests import ForkRequest


class Job:
    """One job, and the client that accesses it.

    ``view`` and the properties show the job's state at the last read. ``refresh`` reads it again; so do ``wait``, ``poll`` and
    actions such as ``suspend``. Most methods call the client's method of the same name.

    >>> job = client.job(job_id)
    >>> job.phase.value, job.progress.step == job.metrics("loss")["loss"].steps[-1]
    ('SUCCEEDED', True)
    """

    def __init__(self, client: RatchetClient, view: views.JobView) -> None:
        self._client = client
        self.view = view

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name!r} {self.phase}, step {self.progress.step_text()}, attempt {self.attempt}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks with the most important values; ``view`` has all of them."""
        view, step = self.view, self.progress.step_text()
        rows = {
            "id": view.id, "phase": view.phase, "reason": view.reason, "message": view.message, "step": step,
            "last checkpoint": view.last_checkpoint, "attempt": view.attempt, "hook": view.hook,
            "device": view.resolved.device, "labels": ", ".join(f"{k}={v}" for k, v in sorted(view.labels.items())),
            "warnings": ", ".join(warning.code for warning in view.warnings), "created": view.created_at,
            "started": view.started_at, "ended": view.ended_at,
        }  # fmt: skip
        return html_table(view.name, rows)

    @property
    def id(self) -> str:
        """``job-`` and twelve letters or digits. The id never changes, and is never reused."""
        return self.view.id

    @property
    def name(self) -> str:
        """The name in the spec; other jobs may have the same name."""
        return self.view.name

    @property
    def phase(self) -> JobPhase:
        """``QUEUED``, ``STARTING``, ``RUNNING``, ``STOPPING``, ``SUSPENDED``, ``SUCCEEDED``, ``FAILED`` or ``CANCELLED``."""
        return self.view.phase

    @property
    def attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return self.view.attempt

    @property
    def progress(self) -> views.ProgressView:
        """``step`` of ``total_steps``, ``data_epoch``, ``steps_at_risk`` (steps since the last checkpoint) and
        ``steps_per_second``."""
        return self.view.progress

    @property
    def last_checkpoint(self) -> str | None:
        """Id of the job's own newest committed checkpoint that it can resume from; None if there is none."""
        return self.view.last_checkpoint

    @property
    def message(self) -> str | None:
        """Why the job waits or how it ended, and what to do next; None if there is nothing to say."""
        return self.view.message

    # --- reading ------------------------------------------------------------------------------------------------------

    def refresh(self) -> Job:
        """Read the job's state again, and return this ``Job``."""
        self.view = self._client.view(self.id)
        return self

    def wait(self, until: Collection[JobPhase] = TERMINAL, deadline: float | None = None,
             on_change: Callable[[views.JobView], None] | None = None) -> Job:  # fmt: skip
        """Wait until the job's phase is one of ``until``, or the job has ended, and return this ``Job``. Raises
        ``DeadlineReached`` after ``deadline`` seconds. ``on_change`` is called with the first state, and at every new phase or
        reason that a poll finds."""
        self.view = self._client.wait(self.id, until, deadline, on_change)
        return self

    def poll(self, every: float = 1.0, until: Collection[JobPhase] | None = None,
             deadline: float | None = None) -> Iterator[Snapshot]:  # fmt: skip
        for now in self._client.poll(self.id, every, until, deadline):
            self.view = now.job
            yield now

    def metrics(self, *names: str) -> dict[str, Series]:
        """Return the curves ``names``, or all curves without ``names``, by name. ``plt.plot(*job.metrics()["loss"])`` draws one
        curve."""
        return self._client.series(self.id, *names)

    def hook(self) -> views.HookView:
        return self._client.hook(self.id)

    def hook_series(self, figure: str = "residual_norm") -> dict[int, Series]:
        return self._client.hook_series(self.id, figure)

    def logs(self, *, follow: bool = False, rank: int | None = None, attempt: WhichAttempt = None,
             tail: int | None = None, grep: str | None = None, since: str | None = None) -> Iterator[views.LogLine]:  # fmt: skip
        """Yield the log lines so far; with ``follow``, also new lines until the job has ended. ``rank``, ``attempt``, ``tail``,
        ``grep``, ``since``: as in the client's ``logs`` and ``follow_logs``."""
        read = self._client.follow_logs if follow else self._client.logs
        return read(self.id, rank=rank, attempt=attempt, tail=tail, grep=grep, since=since)

    def events(self, *, follow: bool = False) -> Iterator[views.EventView]:
        """Yield the events so far, oldest first. With ``follow``, also yield new events, until the job has ended."""
        return self._client.follow_events(self.id) if follow else self._client.events(self.id)

    def attempts(self) -> list[views.AttemptView]:
        """Return all attempts, oldest first."""
        return self._client.attempts(self.id)

    def checkpoints(self) -> Iterator[views.CheckpointView]:
        return self._client.checkpoints(self.id)

    def files(self, path: str = "", *, everything: bool = False) -> Iterator[views.FileView]:
        """Yield the files, directories and links below ``path`` in the job's working directory. ``everything``: include unchanged
        files of the job's code."""
        return self._client.files(self.id, path, everything=everything)

    def fetch_files(self, target: str | os.PathLike[str], path: str = "", *, force: bool = False) -> Fetched:
        """Download the file or directory ``path`` of the job's working directory (default: all of it) into the directory
        ``target``. ``force``: replace existing files; without it, an existing file raises ``Refused``, and nothing is written.
        Raises ``NotFound`` if there is no ``path``."""
        return self._client.fetch_files(self.id, target, path, force=force)

    # --- actions -------------------------------------------------------------------------------------------------------

    def suspend(self) -> Job:
        return self._now(self._client.suspend(self.id))

    def resume(self, from_step: int | None = None, **changes: Any) -> Job:
        """Resume the job, and return this ``Job`` without waiting for the training. ``from_step``: the step of an older
        checkpoint. ``changes``: further arguments of the client's ``resume``."""
        return self._now(self._client.resume(self.id, from_step, **changes))

    def cancel(self) -> Job:
        return self._now(self._client.cancel(self.id))

    def preempt(self) -> Job:
        return self._now(self._client.preempt(self.id))

    def checkpoint_now(self) -> Job:
        return self._now(self._client.checkpoint_now(self.id))

    def fork(self, request: ForkRequest, *, upload: bool | None = None) -> Job:
        """Create and return a new job from a checkpoint of this one. ``request``, ``upload``: as in the client's ``fork``."""
        return self._client.fork(self.id, request, upload=upload)

    def delete(self, *, keep_checkpoints: bool = False, outputs: bool = False) -> views.DeleteResult:
        return self._client.delete(self.id, keep_checkpoints=keep_checkpoints, outputs=outputs)

    # --- checkpoints: by default the newest one ------------------------------------------------------------

    def verify(self, checkpoint_id: str | None = None) -> views.VerifyResult:
        """Let the service verify the checkpoint ``checkpoint_id`` (default: the newest). ``verification`` of the result says
        whether the checkpoint is damaged; a damaged one may be moved to the quarantine. Raises ``NotFound`` if the job has no
        checkpoint, and ``Conflict`` if the checkpoint is quarantined or deleted already."""
        return self._client.verify(self.id, self._checkpoint(checkpoint_id))

    def export(self, target: str | os.PathLike[str], checkpoint_id: str | None = None, *,
               format: ExportFormat = "safetensors") -> list[str]:  # fmt: skip
        """Export the checkpoint ``checkpoint_id`` (default: the newest) for other programs, and return notes for the reader of
        the files. ``target``, ``format``: as in the client's ``export``. Raises ``NotFound`` if the job has no checkpoint."""
        return self._client.export(self.id, self._checkpoint(checkpoint_id), target, format=format)

    def pin(self, checkpoint_id: str | None = None, pinned: bool = True) -> views.CheckpointView:
        """Pin the checkpoint ``checkpoint_id`` (default: the newest), so that retention does not delete it; ``pinned=False``
        removes the pin. Raises ``NotFound`` if the job has no checkpoint, and ``Conflict`` as the client's ``pin`` does."""
        return self._client.pin(self.id, self._checkpoint(checkpoint_id), pinned)

    def _checkpoint(self, checkpoint_id: str | None) -> str:
        found = checkpoint_id or self.refresh().last_checkpoint
        if found is None:
            raise NotFound(f"job {self.id} has no checkpoint at step {self.progress.step_text()}")
        return found

    def _now(self, view: views.JobView) -> Job:
        self.view = view
        return self
