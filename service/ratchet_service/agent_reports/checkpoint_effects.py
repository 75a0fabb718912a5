"""Applies messages about checkpoints to the database. One report can have many such messages, so the rows of all their
checkpoints are read with few statements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import JobPaths, checkpoint_dir_name
from ratchet_contract.phases import EventType
from ratchet_contract.protocol.messages import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointUploaded,
    HookState,
    Quarantined,
    RankBatch,
    RankMessage,
)
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Attempt, Checkpoint, Job
from ratchet_service.db.sanitize import parse_time, sanitize_json, sanitize_text
from ratchet_service.db.types import MAX_NUMBER
from ratchet_service.isolation.file_access import as_owner
from ratchet_store.format.manifest_file import read_manifest

Key = tuple[int, int]
"""Step and attempt."""
_CHECKPOINT_MESSAGES: Final = (CheckpointCommitted, CheckpointUploaded, CheckpointDeleted, Quarantined)
_CHUNK: Final = 500


def reported_iterations(batches: Sequence[RankBatch]) -> tuple[dict[Key, int], list[CheckpointCommitted]]:
    """Return the hook iterations of committed checkpoints, by step and attempt, as far as the batches contain them. Also return
    the commits whose hook iteration is not in the batches."""
    out: dict[Key, int] = {}
    unknown: list[CheckpointCommitted] = []
    for batch in batches:
        iterations_by_step = {
            message.summary.step: message.summary.iteration
            for message in batch.messages
            if batch.rank == 0 and isinstance(message, HookState)
        }
        for message in batch.messages:
            if isinstance(message, CheckpointCommitted):
                found = iterations_by_step.get(message.step, -1)
                if 0 <= found <= MAX_NUMBER:
                    out[message.step, message.attempt] = found
                else:
                    unknown.append(message)
    return out, unknown


def hook_iterations(batches: Sequence[RankBatch], job: JobPaths) -> dict[Key, int]:
    """Return the hook iterations, as far as known, of the checkpoints that ``batches`` report as committed, by step and attempt.
    May read the disk: call it outside transactions."""
    out, unknown = reported_iterations(batches)
    for message in unknown:
        found = _saved_iteration(job, message)
        if found is not None and 0 <= found <= MAX_NUMBER:
            out[message.step, message.attempt] = found
    return out


def _saved_iteration(job: JobPaths, message: CheckpointCommitted) -> int | None:
    """Return the hook iteration of rank 0 in the checkpoint's manifest; None if it cannot be read or has none."""
    try:
        with as_owner(job.root):
            manifest = read_manifest(job.checkpoint(message.step, message.attempt))
    except (CheckpointError, ValueError, OverflowError):
        return None
    return next((s.iteration for s in manifest.hook_summaries if s.rank == 0), None)


class Checkpoints:
    """Applies one attempt's messages about checkpoints to the rows, in the caller's transaction. ``has_commits``: True once a
    commit was applied."""

    def __init__(
        self,
        session: Session,
        job: Job,
        attempt: Attempt,
        iterations: Mapping[Key, int],
        add_event: Callable[[EventType, str, dict[str, Any]], None],
    ) -> None:
        self._session, self._job, self._attempt, self._iterations = session, job, attempt, iterations
        self._add_event, self._now = add_event, now_in(session)
        self._rows: dict[Key, Checkpoint | None] = {}
        self.has_commits = False

    def prefetch(self, messages: Iterable[RankMessage]) -> None:
        """Read the checkpoint rows that ``messages`` need with few queries."""
        keys = {(m.step, m.attempt) for m in messages if isinstance(m, _CHECKPOINT_MESSAGES)}
        new = [key for key in keys if key not in self._rows and all(0 <= number <= MAX_NUMBER for number in key)]
        steps = sorted({step for step, _ in new})
        for begin in range(0, len(steps), _CHUNK):
            some = Checkpoint.job_id == self._job.id, Checkpoint.step.in_(steps[begin : begin + _CHUNK])
            for row in self._session.scalars(sa.select(Checkpoint).where(*some)):
                self._rows.setdefault((row.step, row.attempt), row)
        for key in new:
            self._rows.setdefault(key, None)

    def apply_committed(self, message: CheckpointCommitted) -> None:
        """Store the commit of a checkpoint, unless it contradicts the attempt or a stored digest, and add an event."""
        name = checkpoint_dir_name(message.step, message.attempt)
        if message.attempt != self._attempt.number:
            self._add_event(
                EventType.CHECKPOINT_IGNORED,
                f"{name} does not belong to attempt {self._attempt.number}",
                {"checkpoint": name},
            )
            return
        row = self._row(message.step, message.attempt)
        if row is None:
            row = Checkpoint(job_id=self._job.id, step=message.step, attempt=message.attempt, state="committed")
            row.created_at = parse_time(message.at, self._now)
            self._session.add(row)
            self._rows[message.step, message.attempt] = row
        elif row.digest != sanitize_text(message.digest)[:64]:
            text = f"{name} is recorded with digest {row.digest}, the report says {sanitize_text(message.digest)[:64]}"
            self._add_event(EventType.CHECKPOINT_IGNORED, text, {"checkpoint": name})
            return
        ended = row.finished is False and message.finished  # None: a new row
        row.digest, row.size, row.files = sanitize_text(message.digest)[:64], message.size, message.files
        row.seconds = message.seconds if math.isfinite(message.seconds) else None
        stall = message.stall
        if stall is not None and math.isfinite(stall):  # the second report of the last commit has none
            row.stall = stall
        row.reason, row.finished = message.reason, message.finished
        row.parent = sanitize_json(message.parent.model_dump(mode="json"))
        row.hook_iteration = self._iterations.get((message.step, message.attempt), row.hook_iteration)
        attempt, job = self._attempt, self._job
        attempt.committed_step = max(attempt.committed_step or 0, message.step)
        attempt.last_step = max(attempt.last_step, message.step)
        if attempt.number == job.attempt and message.step >= job.committed_step:
            job.committed_step, job.committed_attempt = message.step, message.attempt
            job.step = max(job.step, message.step)  # the progress is reported later
        self.has_commits = True
        data = {"checkpoint": name, "step": message.step, "reason": message.reason, "size": message.size}
        text = "is the job's last" if ended else f"committed ({message.reason})"
        self._add_event(EventType.CHECKPOINT, f"checkpoint {name} {text}", data)

    def apply_uploaded(self, message: CheckpointUploaded) -> None:
        """Store that the checkpoint's copy in the object store is complete, if it has a row with that digest. A deleted or
        quarantined checkpoint becomes committed again."""
        name = checkpoint_dir_name(message.step, message.attempt)
        row = self._row(message.step, message.attempt)
        if row is None:
            return  # its commit has not been reported yet; agents report each copy a second time
        if row.digest != sanitize_text(message.digest)[:64]:
            text = f"{name} was copied to {sanitize_text(message.uri)}, but is recorded with digest {row.digest}"
            self._add_event(EventType.CHECKPOINT_IGNORED, text, {"checkpoint": name})
            return
        if row.state == "quarantined":  # the verification result is about the damaged files that were here before
            row.verified_at = row.verification = row.verification_error = None
        # also of a deleted or quarantined one: usually it was fetched from there because the disk had lost or damaged it
        row.state = "committed"
        if row.uploaded_at is None:
            row.uri, row.uploaded_at = sanitize_text(message.uri)[:2000], parse_time(message.at, self._now)
            seconds = message.seconds if math.isfinite(message.seconds) else None
            data = {"checkpoint": name, "uri": row.uri, "nbytes": message.nbytes, "seconds": seconds}
            self._add_event(EventType.CHECKPOINT_UPLOADED, f"checkpoint {name} is copied to {row.uri}", data)

    def apply_quarantined(self, message: Quarantined) -> None:
        """Store in the checkpoint's row, if there is one, that it is quarantined, and add an event in any case."""
        self._set_state(message.step, message.attempt, "quarantined")
        name = checkpoint_dir_name(message.step, message.attempt)
        text = f"checkpoint {name} is damaged and was moved to the quarantine: {sanitize_text(message.error)}"
        self._add_event(EventType.CHECKPOINT_QUARANTINED, text, {"checkpoint": name})

    def apply_deleted(self, message: CheckpointDeleted) -> None:
        """Store in the checkpoint's row, if there is one, that its files were deleted."""
        self._set_state(message.step, message.attempt, "deleted")

    def _set_state(self, step: int, attempt: int, state: str) -> None:
        """Set the state of the checkpoint's row, if there is one."""
        row = self._row(step, attempt)
        if row is not None:
            row.state = state

    def _row(self, step: int, attempt: int) -> Checkpoint | None:
        """Return the checkpoint's row, read once; None: there is none."""
        if (step, attempt) not in self._rows:
            self._rows[step, attempt] = self._session.get(Checkpoint, (self._job.id, step, attempt))
        return self._rows[step, attempt]
