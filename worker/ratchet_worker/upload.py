"""Committed checkpoints go to the object store from a thread of node 0's agent, which nobody waits for while ranks train.

What fails is told and tried again, ever more rarely; training does not notice. After the ranks' end one more round follows,
within what the caller allows; what is missing then is told by name, and the next attempt's agent copies it.
"""

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
from ratchet_contract.messages import AGENT_RANK, CheckpointDeleted, CheckpointUploaded, LaunchFile, Note
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_store.mirror import Mirror, Step, Uploaded
from ratchet_store.objects import Patience
from ratchet_store.remote import open_job
from ratchet_worker.files import now, say
from ratchet_worker.spool import Spool

_PERIOD: Final = 1.0
_FIRST_DELAY: Final = 1.0
_LAST_DELAY: Final = 60.0
_ONCE_MORE: Final = 5.0
"""Seconds after which a copy is told once more: it may have been whole before rank 0 had reported the commit."""
_TELL_AGAIN: Final = 600.0  # seconds between two events of one failure that goes on
_PATIENCE: Final = Patience(connect=5.0, request=120.0, retry=30.0)
_NAME: Final = "upload"


class Telling:
    """Messages of the agent itself: a spool that only it writes to, beside the ranks'."""

    def __init__(self, paths: AttemptPaths) -> None:
        self._spool = Spool(paths.agent_spool)

    def note(self, kind: str, message: str) -> None:
        say(f"{kind}: {message}")
        self._spool.append(Note(rank=AGENT_RANK, at=now(), type=kind, message=message[:4000]))

    def uploaded(self, done: Uploaded) -> None:
        manifest = done.manifest
        self._spool.append(
            CheckpointUploaded(
                rank=AGENT_RANK,
                at=now(),
                step=manifest.step,
                epoch=manifest.epoch,
                digest=manifest.digest,
                uri=done.uri,
                seconds=done.seconds,
                nbytes=done.nbytes,
            )
        )

    def deleted(self, step: int, epoch: int) -> None:
        self._spool.append(CheckpointDeleted(rank=AGENT_RANK, at=now(), step=step, epoch=epoch))

    def close(self) -> None:
        self._spool.close()


class _Over(Exception):
    """No time is left, or nothing may be written any more."""


class Uploader:
    """``start`` once; ``finish`` or ``abandon`` at the end, from the same thread as ``start``."""

    def __init__(self, launch: LaunchFile, telling: Telling) -> None:
        assert launch.spec.checkpoint.uri is not None
        self._launch, self._uri, self._telling = launch, launch.spec.checkpoint.uri, telling
        self._mirror: Mirror | None = None
        self._wake = threading.Event()
        self._end: float | None = None  # monotonic, once the ranks have ended
        self._failures, self._told_at, self._told = 0, 0.0, ""
        self._known: set[str] = set()
        self._once_more: list[tuple[float, Uploaded]] = []
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Copy what is missing for at most ``seconds``, then tell what still is. Without a start there is nothing to do."""
        if self._thread.ident is None:
            return
        self._end = time.monotonic() + seconds
        self._wake.set()
        self._thread.join(seconds + 0.5)
        self._repeat(math.inf)
        missing = self._missing()
        if missing:
            names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            text = f"not in the object store when the attempt ended: {names}. The next attempt's agent copies what is still here"
            self._telling.note("upload-incomplete", text)

    def abandon(self) -> None:
        """The attempt is fenced: not one more object."""
        self._end = 0.0
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(0.5)

    def _missing(self) -> list[str]:
        with suppress(CheckpointError):
            return self._opened().pending()
        return ["whatever was committed"]

    def _run(self) -> None:
        while True:
            ending = self._end is not None
            try:
                step = self._opened().step(self._insist)
            except _Over:
                return
            except Exception as error:  # never the end of uploading: the next round starts afresh
                self._failed(error)
                if ending:
                    return
                self._wake.wait(self._back_off())
                continue
            self._tell(step)
            self._repeat(time.monotonic())
            if step.idle:
                if ending:
                    return
                self._wake.wait(_PERIOD)

    def _opened(self) -> Mirror:
        if self._mirror is None:
            job = JobPaths(Path(self._launch.job_root))
            remote = open_job(self._uri, self._launch.job_id, _PATIENCE)
            self._mirror = Mirror(remote, job.checkpoints, job.quarantine, self._launch.lineage, self._launch.epoch)
        return self._mirror

    def _insist(self) -> None:
        if self._end is not None and time.monotonic() > self._end:
            raise _Over

    def _tell(self, step: Step) -> None:
        if self._failures:
            say("the object store answers again")
        self._failures, self._told = 0, ""
        if step.uploaded is not None and step.uploaded.manifest.id not in self._known:
            self._known.add(step.uploaded.manifest.id)
            say(f"{step.uploaded.manifest.id} is in the object store: {step.uploaded.nbytes} bytes sent now")
            self._telling.uploaded(step.uploaded)
            self._once_more.append((time.monotonic() + _ONCE_MORE, step.uploaded))
        if step.failed is not None:
            self._telling.note("upload-failed", f"{step.failed.folder}: {step.failed.error}")
        for number, epoch in step.removed:
            self._once_more = [
                (at, done)
                for at, done in self._once_more
                if (done.manifest.step, done.manifest.epoch) != (number, epoch)
            ]  # it would be taken for one that is here again
            self._telling.deleted(number, epoch)

    def _repeat(self, now: float) -> None:
        while self._once_more and self._once_more[0][0] <= now:
            self._telling.uploaded(self._once_more.pop(0)[1])

    def _failed(self, error: Exception) -> None:
        text = error.detail if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        code = getattr(error, "code", type(error).__name__)
        self._failures += 1
        if code != self._told or time.monotonic() - self._told_at > _TELL_AGAIN:
            self._told, self._told_at = code, time.monotonic()
            self._telling.note("upload-failed", f"{text}; training goes on, and it is tried again")

    def _back_off(self) -> float:
        nominal = min(_LAST_DELAY, _FIRST_DELAY * 2.0 ** min(self._failures - 1, 10))
        return nominal * random.uniform(0.5, 1.0)


def leave(code: int) -> NoReturn:
    """End the process with ``code``. A thread that hangs in a request is not waited for: an interpreter that ends beside it would
    unwind it through code that cannot be unwound."""
    if any(thread.name in (_NAME, "fetch") for thread in threading.enumerate()):
        with suppress(OSError, ValueError):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
