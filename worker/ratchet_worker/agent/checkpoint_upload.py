"""Uploads committed checkpoints to the object store in a thread of node 0's agent, and deletes the copies of deleted ones.
Failures are reported, without effect on training."""

from __future__ import annotations

import math
import os
import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.phases import NoteType
from ratchet_contract.protocol.messages import AGENT_RANK, CheckpointDeleted, CheckpointUploaded, LaunchFile, Note
from ratchet_store.object_store.client import Patience
from ratchet_store.object_store.remote_checkpoints import open_job_checkpoints
from ratchet_store.object_store.upload import Mirror, Step, Uploaded
from ratchet_worker.ipc.log_lines import log_message, now
from ratchet_worker.ipc.report_spool import Spool

_PERIOD: Final = 1.0
_FIRST_DELAY: Final = 1.0
_LAST_DELAY: Final = 60.0
_REPEAT_SECONDS: Final = 5.0
"""Seconds after which an upload is reported once more: it may have been complete before rank 0 reported the commit."""
_REPORT_AGAIN_SECONDS: Final = 600.0  # seconds between two events for the same continuing failure
_PATIENCE: Final = Patience(connect=5.0, request=120.0, retry=30.0)
_NAME: Final = "upload"


class AgentMessages:
    """Messages of the agent itself to the service, in a spool of its own that only the agent writes to."""

    def __init__(self, paths: AttemptPaths) -> None:
        self._spool = Spool(paths.agent_spool)

    def note(self, kind: NoteType, message: str) -> None:
        """Write a message to the agent's log and, cut to 4000 characters, to the job's history. ``kind``: the event's type."""
        log_message(f"{kind}: {message}")
        self._spool.append(Note(rank=AGENT_RANK, at=now(), type=kind, message=message[:4000]))

    def report_uploaded(self, upload: Uploaded) -> None:
        """Report that a checkpoint is complete in the object store, with the bytes sent and the seconds that this took."""
        manifest = upload.manifest
        self._spool.append(
            CheckpointUploaded(
                rank=AGENT_RANK,
                at=now(),
                step=manifest.step,
                attempt=manifest.attempt,
                digest=manifest.digest,
                uri=upload.uri,
                seconds=upload.seconds,
                nbytes=upload.nbytes,
            )
        )

    def report_deleted(self, step: int, attempt: int) -> None:
        """Report that a checkpoint was deleted from the object store."""
        self._spool.append(CheckpointDeleted(rank=AGENT_RANK, at=now(), step=step, attempt=attempt))

    def close(self) -> None:
        self._spool.close()


class _Over(Exception):
    """Raised in the upload thread if its deadline has passed."""


class Uploader:
    """Uploads committed checkpoints in a thread of its own, and deletes the copies of deleted ones. Call ``start``, then
    ``finish`` or ``abandon``."""

    def __init__(self, launch: LaunchFile, messages: AgentMessages) -> None:
        assert launch.spec.checkpoint.uri is not None
        self._launch, self._uri, self._messages = launch, launch.spec.checkpoint.uri, messages
        self._mirror: Mirror | None = None
        self._wake = threading.Event()
        self._deadline: float | None = None  # monotonic, once the ranks have ended
        self._failures, self._reported_at, self._reported_code = 0, 0.0, ""
        self._reported_ids: set[str] = set()
        self._pending_repeats: list[tuple[float, Uploaded]] = []
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Upload missing checkpoints for at most ``seconds``, then report those not known to be in the store. Blocks."""
        if self._thread.ident is None:
            return
        self._deadline = time.monotonic() + seconds
        self._wake.set()
        self._thread.join(seconds + 0.5)
        self._repeat_reports(math.inf)
        missing = self._missing()
        if missing:
            names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            text = f"not in the object store when the attempt ended: {names}. The next attempt's agent copies those still here"
            self._messages.note(NoteType.UPLOAD_INCOMPLETE, text)

    def abandon(self) -> None:
        """Stop uploading as soon as possible, since the attempt is fenced. Waits for the thread, at most half a second."""
        self._deadline = 0.0
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(0.5)

    def _missing(self) -> list[str]:
        """Return the names of committed checkpoints that are not known to be in the store. If they cannot be determined,
        return one general text instead."""
        with suppress(CheckpointError, OSError):
            return self._open_mirror().pending()
        return ["any committed checkpoint"]

    def _run(self) -> None:
        """The thread's loop: call ``Mirror.step`` repeatedly, with pauses, until ``finish`` or ``abandon`` ends it."""
        while True:
            ending = self._deadline is not None
            try:
                step = self._open_mirror().step(self._raise_if_over)
            except _Over:
                return
            except Exception as error:  # must not end uploading: the next round starts afresh
                self._report_failure(error)
                if ending:
                    return
                self._wake.wait(self._back_off())
                continue
            self._report_step(step)
            self._repeat_reports(time.monotonic())
            if step.idle:
                if ending:
                    return
                self._wake.wait(_PERIOD)

    def _open_mirror(self) -> Mirror:
        """The connection to the job's checkpoints in the store, opened at the first call and kept. Raises ``CheckpointError``."""
        if self._mirror is None:
            job = JobPaths(Path(self._launch.job_root))
            remote = open_job_checkpoints(self._uri, self._launch.job_id, _PATIENCE)
            self._mirror = Mirror(remote, job.checkpoints, job.quarantine, self._launch.lineage, self._launch.attempt)
        return self._mirror

    def _raise_if_over(self) -> None:
        """Raise ``_Over`` if the deadline set by ``finish`` or ``abandon`` has passed."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise _Over

    def _report_step(self, step: Step) -> None:
        """Report what one round has uploaded, failed to upload and deleted, and reset the count of failures."""
        if self._failures:
            log_message("the object store answers again")
        self._failures, self._reported_code = 0, ""
        if step.uploaded is not None and step.uploaded.manifest.id not in self._reported_ids:
            self._reported_ids.add(step.uploaded.manifest.id)
            log_message(f"{step.uploaded.manifest.id} is in the object store: {step.uploaded.nbytes} bytes sent now")
            self._messages.report_uploaded(step.uploaded)
            self._pending_repeats.append((time.monotonic() + _REPEAT_SECONDS, step.uploaded))
        if step.failed is not None:
            self._messages.note(NoteType.UPLOAD_FAILED, f"{step.failed.folder}: {step.failed.error}")
        for number, attempt in step.removed:
            self._pending_repeats = [
                (at, done)
                for at, done in self._pending_repeats
                if (done.manifest.step, done.manifest.attempt) != (number, attempt)
            ]  # the repeated report would make it look as if it existed again
            self._messages.report_deleted(number, attempt)

    def _repeat_reports(self, now: float) -> None:
        """Report uploads a second time if due at ``now``: the first report may have come before rank 0's report of the commit."""
        while self._pending_repeats and self._pending_repeats[0][0] <= now:
            self._messages.report_uploaded(self._pending_repeats.pop(0)[1])

    def _report_failure(self, error: Exception) -> None:
        """Count a failure of a whole round, and report it. A failure of the same kind as the last one reported is not reported
        again for a while, unless a round has succeeded since."""
        text = error.detail if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        code = getattr(error, "code", type(error).__name__)
        self._failures += 1
        if code != self._reported_code or time.monotonic() - self._reported_at > _REPORT_AGAIN_SECONDS:
            self._reported_code, self._reported_at = code, time.monotonic()
            self._messages.note(NoteType.UPLOAD_FAILED, f"{text}; training continues, and the upload is retried")

    def _back_off(self) -> float:
        """The seconds to wait after a failure: random, and growing with the failures in a row up to ``_LAST_DELAY``."""
        nominal = min(_LAST_DELAY, _FIRST_DELAY * 2.0 ** min(self._failures - 1, 10))
        return nominal * random.uniform(0.5, 1.0)


def exit_process(code: int) -> NoReturn:
    """End the process with ``code``, at once: an upload or download thread may hang, and the next attempt waits for this end."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code)
