"""A job at hand: what ``submit``, ``fork`` and ``job`` of the client give. It knows its id and how it was when last read."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from ratchet_client.job_files import Fetched
from ratchet_client.polling import TERMINAL, Series, Snapshot
from ratchet_contract import api
from ratchet_contract.errors import NotFound
from ratchet_contract.phases import JobPhase
from ratchet_contract.view_text import html_table

if TYPE_CHECKING:
    from ratchet_client.client import RatchetClient
    from ratchet_client.exports import ExportFormat
    from ratchet_client.following import WhichAttempt
    from ratchet_contract.api_requests import ForkRequest


class Job:
    """One job, and the client to ask for it.

    ``view`` and the properties are the job as it was when last read: by ``refresh``, ``wait`` or an action. Methods without a
    description are the client's of the same name.

    >>> job = client.job(job_id)
    >>> job.phase.value, job.progress.step == job.metrics("loss")["loss"].steps[-1]
    ('SUCCEEDED', True)
    """

    def __init__(self, client: RatchetClient, view: api.JobView) -> None:
        self._client = client
        self.view = view

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name!r} {self.phase}, step {self.progress.out_of()}, attempt {self.attempt}>"

    def _repr_html_(self) -> str:
        """For notebooks: what one looks for first; ``view`` has all of it."""
        view, step = self.view, self.progress.out_of()
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
        """``job-`` and twelve letters and digits; never changes, and is never given again."""
        return self.view.id

    @property
    def name(self) -> str:
        """As the spec has it; other jobs may have it, too."""
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
    def progress(self) -> api.ProgressView:
        """``step`` of ``total_steps``, ``data_epoch``, ``steps_at_risk`` since the last checkpoint, ``steps_per_second``."""
        return self.view.progress

    @property
    def last_checkpoint(self) -> str | None:
        """Id of the newest committed checkpoint that the job can go on from."""
        return self.view.last_checkpoint

    @property
    def message(self) -> str | None:
        """Why it waits or how it ended, with what to do next."""
        return self.view.message

    # --- looking ------------------------------------------------------------------------------------------------------

    def refresh(self) -> Job:
        """Read it again."""
        self.view = self._client.view(self.id)
        return self

    def wait(self, until: Collection[JobPhase] = TERMINAL, deadline: float | None = None,
             on_change: Callable[[api.JobView], None] | None = None) -> Job:  # fmt: skip
        """Until its phase is one of ``until``, or it has ended. ``deadline``: seconds, then ``DeadlineReached``. ``on_change`` is
        called with every new phase or reason."""
        self.view = self._client.wait(self.id, until, deadline, on_change)
        return self

    def poll(self, every: float = 1.0, until: Collection[JobPhase] | None = None,
             deadline: float | None = None) -> Iterator[Snapshot]:  # fmt: skip
        for now in self._client.poll(self.id, every, until, deadline):
            self.view = now.job
            yield now

    def metrics(self, *names: str) -> dict[str, Series]:
        """Curves by name, all of them without ``names``: ``plt.plot(*job.metrics()["loss"])``."""
        return self._client.series(self.id, *names)

    def hook(self) -> api.HookView:
        return self._client.hook(self.id)

    def hook_series(self, figure: str = "residual_norm") -> dict[int, Series]:
        return self._client.hook_series(self.id, figure)

    def logs(self, *, follow: bool = False, rank: int | None = None, attempt: WhichAttempt = None,
             tail: int | None = None, grep: str | None = None, since: str | None = None) -> Iterator[api.LogLine]:  # fmt: skip
        """Lines that are there now, or with ``follow`` as they are written, until the job has ended. ``rank``, ``attempt``,
        ``tail``, ``grep``, ``since``: as of the client's ``logs``."""
        read = self._client.follow_logs if follow else self._client.logs
        return read(self.id, rank=rank, attempt=attempt, tail=tail, grep=grep, since=since)

    def events(self, *, follow: bool = False) -> Iterator[api.EventView]:
        """The history that is there now, oldest first, or with ``follow`` on until the job has ended."""
        return self._client.follow_events(self.id) if follow else self._client.events(self.id)

    def attempts(self) -> list[api.AttemptView]:
        return self._client.attempts(self.id)

    def checkpoints(self) -> Iterator[api.CheckpointView]:
        return self._client.checkpoints(self.id)

    def files(self, path: str = "", *, everything: bool = False) -> Iterator[api.FileView]:
        """What is below ``path`` of its working directory, each directory before what is in it. ``everything``: with what its
        code brought there and nobody has changed."""
        return self._client.files(self.id, path, everything=everything)

    def fetch_files(self, target: str | os.PathLike[str], path: str = "", *, force: bool = False) -> Fetched:
        """Write the file or directory ``path`` of its working directory into the directory ``target``, under its own name; all of
        it without ``path``. No file is replaced without ``force``; what is fetched is whole, or nothing is written."""
        return self._client.fetch_files(self.id, target, path, force=force)

    # --- acting -------------------------------------------------------------------------------------------------------

    def suspend(self) -> Job:
        return self._now(self._client.suspend(self.id))

    def resume(self, from_step: int | None = None, **changes: Any) -> Job:
        """Go on, ``from_step``: from an older checkpoint. ``changes``: further keywords of the client's ``resume``."""
        return self._now(self._client.resume(self.id, from_step, **changes))

    def cancel(self) -> Job:
        return self._now(self._client.cancel(self.id))

    def preempt(self) -> Job:
        return self._now(self._client.preempt(self.id))

    def checkpoint_now(self) -> Job:
        return self._now(self._client.checkpoint_now(self.id))

    def fork(self, request: ForkRequest, *, upload: bool | None = None) -> Job:
        """A new job from a checkpoint of this one, with a changed spec. ``request``, ``upload``: as of the client's ``fork``."""
        return self._client.fork(self.id, request, upload=upload)

    def delete(self, *, keep_checkpoints: bool = False, outputs: bool = False) -> api.DeleteResult:
        return self._client.delete(self.id, keep_checkpoints=keep_checkpoints, outputs=outputs)

    # --- its checkpoints: the newest one where none is named ------------------------------------------------------------

    def verify(self, checkpoint_id: str | None = None) -> api.VerifyResult:
        """Have every byte of the checkpoint ``checkpoint_id`` read and compared with its digests. Raises ``NotFound`` where there
        is none."""
        return self._client.verify(self.id, self._checkpoint(checkpoint_id))

    def export(self, target: str | os.PathLike[str], checkpoint_id: str | None = None, *,
               format: ExportFormat = "safetensors") -> list[str]:  # fmt: skip
        """Write the checkpoint ``checkpoint_id`` as files for other programs. ``target``, ``format``: as of the client's
        ``export``."""
        return self._client.export(self.id, self._checkpoint(checkpoint_id), target, format=format)

    def pin(self, checkpoint_id: str | None = None, pinned: bool = True) -> api.CheckpointView:
        """Keep the checkpoint ``checkpoint_id`` whatever retention says, or with ``pinned=False`` let it go again."""
        return self._client.pin(self.id, self._checkpoint(checkpoint_id), pinned)

    def _checkpoint(self, checkpoint_id: str | None) -> str:
        found = checkpoint_id or self.refresh().last_checkpoint
        if found is None:
            raise NotFound(f"job {self.id} has no checkpoint at step {self.progress.out_of()}")
        return found

    def _now(self, view: api.JobView) -> Job:
        self.view = view
        return self
