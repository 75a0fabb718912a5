"""What messages about checkpoints change. A job may save at every step, so that a report brings many: their rows are read by one
statement, and what has changed is written by one flush, with all else that the report has changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.errors import CheckpointError
from ratchet_contract.messages import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointUploaded,
    HookState,
    Quarantined,
    RankBatch,
    RankMessage,
)
from ratchet_contract.paths import JobPaths, checkpoint_dir_name
from ratchet_service.clock import now_in
from ratchet_service.columns import MAX_NUMBER
from ratchet_service.file_owner import as_owner
from ratchet_service.models import Attempt, Checkpoint, Job
from ratchet_service.storable import storable, storable_json, when
from ratchet_store.commit import read_manifest

Key = tuple[int, int]
"""Step and epoch."""
_OF_ONE: Final = (CheckpointCommitted, CheckpointUploaded, CheckpointDeleted, Quarantined)
_CHUNK: Final = 500


def told_iterations(batches: Sequence[RankBatch]) -> tuple[dict[Key, int], list[CheckpointCommitted]]:
    """Iteration of the hook in each checkpoint that the batches report, as rank 0 has told it beside its save, which is in the
    same batch but for chance; and those of which it is not told."""
    out: dict[Key, int] = {}
    unknown: list[CheckpointCommitted] = []
    for batch in batches:
        told = {
            message.summary.step: message.summary.iteration
            for message in batch.messages
            if batch.rank == 0 and isinstance(message, HookState)
        }
        for message in batch.messages:
            if isinstance(message, CheckpointCommitted):
                found = told.get(message.step, -1)
                if 0 <= found <= MAX_NUMBER:
                    out[message.step, message.epoch] = found
                else:
                    unknown.append(message)
    return out, unknown


def hook_iterations(batches: Sequence[RankBatch], job: JobPaths) -> dict[Key, int]:
    """The same, and of those that are not told from their manifests. To be called outside of transactions."""
    out, unknown = told_iterations(batches)
    for message in unknown:
        found = _saved_iteration(job, message)
        if found is not None and 0 <= found <= MAX_NUMBER:
            out[message.step, message.epoch] = found
    return out


def _saved_iteration(job: JobPaths, message: CheckpointCommitted) -> int | None:
    """As rank 0 saved it; None where the manifest cannot be read (any more)."""
    try:
        with as_owner(job.root):
            manifest = read_manifest(job.checkpoint(message.step, message.epoch))
    except (CheckpointError, ValueError, OverflowError):
        return None
    return next((s.iteration for s in manifest.hook_summaries if s.rank == 0), None)


class Checkpoints:
    """Of the job of one attempt, within the caller's transaction; ``commits``: has any been committed? ``event`` adds one: its
    type, its message and its data."""

    def __init__(
        self,
        session: Session,
        job: Job,
        attempt: Attempt,
        iterations: Mapping[Key, int],
        event: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self._session, self._job, self._attempt, self._iterations = session, job, attempt, iterations
        self._event, self._now = event, now_in(session)
        self._rows: dict[Key, Checkpoint | None] = {}
        self.commits = False

    def foresee(self, messages: Iterable[RankMessage]) -> None:
        """Read the rows that these will ask for, which else are read one by one."""
        keys = {(m.step, m.epoch) for m in messages if isinstance(m, _OF_ONE)}
        new = [key for key in keys if key not in self._rows and all(0 <= number <= MAX_NUMBER for number in key)]
        steps = sorted({step for step, _ in new})
        for begin in range(0, len(steps), _CHUNK):
            some = Checkpoint.job_id == self._job.id, Checkpoint.step.in_(steps[begin : begin + _CHUNK])
            for row in self._session.scalars(sa.select(Checkpoint).where(*some)):
                self._rows.setdefault((row.step, row.epoch), row)
        for key in new:
            self._rows.setdefault(key, None)

    def committed(self, message: CheckpointCommitted) -> None:
        name = checkpoint_dir_name(message.step, message.epoch)
        if message.epoch != self._attempt.number:
            self._event("checkpoint-ignored", f"{name} is not of attempt {self._attempt.number}", {"checkpoint": name})
            return
        row = self._row(message.step, message.epoch)
        if row is None:
            row = Checkpoint(job_id=self._job.id, step=message.step, epoch=message.epoch, state="committed")
            row.created_at = when(message.at, self._now)
            self._session.add(row)
            self._rows[message.step, message.epoch] = row
        elif row.digest != storable(message.digest)[:64]:
            text = f"{name} is recorded with digest {row.digest}, the report says {storable(message.digest)[:64]}"
            self._event("checkpoint-ignored", text, {"checkpoint": name})
            return
        ended = row.finished is False and message.finished  # None: a new row
        row.digest, row.size, row.files = storable(message.digest)[:64], message.size, message.files
        row.seconds = message.seconds if math.isfinite(message.seconds) else None
        stall = message.stall
        if stall is not None and math.isfinite(stall):  # not told again with what showed behind the commit
            row.stall = stall
        row.reason, row.finished = message.reason, message.finished
        row.parent = storable_json(message.parent.model_dump(mode="json"))
        row.hook_iteration = self._iterations.get((message.step, message.epoch), row.hook_iteration)
        attempt, job = self._attempt, self._job
        attempt.committed_step = max(attempt.committed_step or 0, message.step)
        attempt.last_step = max(attempt.last_step, message.step)
        if attempt.number == job.epoch and message.step >= job.committed_step:
            job.committed_step, job.committed_epoch = message.step, message.epoch
        self.commits = True
        data = {"checkpoint": name, "step": message.step, "reason": message.reason, "size": message.size}
        text = "is the job's last" if ended else f"committed ({message.reason})"
        self._event("checkpoint", f"checkpoint {name} {text}", data)

    def uploaded(self, message: CheckpointUploaded) -> None:
        """Its copy is whole. One that the row says was deleted or set aside is here again: fetched, since its disk had lost or
        damaged it."""
        name = checkpoint_dir_name(message.step, message.epoch)
        row = self._row(message.step, message.epoch)
        if row is None:
            return  # its commit has not been reported yet; agents say this once more
        if row.digest != storable(message.digest)[:64]:
            text = f"{name} was copied to {storable(message.uri)}, but is recorded with digest {row.digest}"
            self._event("checkpoint-ignored", text, {"checkpoint": name})
            return
        if row.state == "quarantined":  # what was found was found in what lay here before
            row.verified_at = row.verification = row.verification_error = None
        row.state = "committed"
        if row.uploaded_at is None:
            row.uri, row.uploaded_at = storable(message.uri)[:2000], when(message.at, self._now)
            seconds = message.seconds if math.isfinite(message.seconds) else None
            data = {"checkpoint": name, "uri": row.uri, "nbytes": message.nbytes, "seconds": seconds}
            self._event("checkpoint-uploaded", f"checkpoint {name} is copied to {row.uri}", data)

    def quarantined(self, message: Quarantined) -> None:
        self._set_state(message.step, message.epoch, "quarantined")
        name = checkpoint_dir_name(message.step, message.epoch)
        text = f"checkpoint {name} is damaged and was set aside: {storable(message.error)}"
        self._event("checkpoint-quarantined", text, {"checkpoint": name})

    def deleted(self, message: CheckpointDeleted) -> None:
        self._set_state(message.step, message.epoch, "deleted")

    def _set_state(self, step: int, epoch: int, state: str) -> None:
        row = self._row(step, epoch)
        if row is not None:
            row.state = state

    def _row(self, step: int, epoch: int) -> Checkpoint | None:
        if (step, epoch) not in self._rows:
            self._rows[step, epoch] = self._session.get(Checkpoint, (self._job.id, step, epoch))
        return self._rows[step, epoch]
