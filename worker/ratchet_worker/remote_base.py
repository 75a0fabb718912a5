"""What an attempt starts from, where the local disk has lost it: fetched from the object store before any rank is started.

The rule. The local directory is asked first, every byte verified; then the store.

- The store has a newer checkpoint of the lineage: it is fetched, and the directory is its cache from then on.
- The store cannot be asked: the attempt goes on with what is here only where that is as new as what the service has recorded, and
  from scratch only where the service has recorded nothing; else it waits, until ``policy.startup_deadline`` has passed without a
  byte, and then ends as a checkpoint-error, to be tried again by policy. It never starts over because a network was away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeVar

from ratchet_contract.errors import CheckpointError
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths, JobPaths, checkpoint_dir_name
from ratchet_contract.phases import Cause
from ratchet_store.fetch import Brought, Progress, bring, newest_local
from ratchet_store.objects import DENIED, NO_CLIENT, REMOTE, Patience
from ratchet_store.remote import open_job
from ratchet_worker.fetched import leave_notes
from ratchet_worker.files import say
from ratchet_worker.results import Conclusion, NotStarted
from ratchet_worker.upload import Telling

T = TypeVar("T")
_PATIENCE: Final = Patience(connect=5.0, request=60.0, retry=10.0)
_PAUSE: Final = 1.0
_AWAY: Final = frozenset({REMOTE, DENIED, NO_CLIENT})


class WaitFor(Protocol):
    """The supervisor's: raises ``NotStarted`` when the attempt is over meanwhile."""

    def __call__(self, done: Callable[[], T | None], deadline: float) -> T | None: ...


def provide(launch: LaunchFile, paths: AttemptPaths, wait_for: WaitFor, telling: Telling) -> None:
    """Make the local directory as new as the object store. Raises ``NotStarted`` (checkpoint-error) by the rule above."""
    if not launch.lineage:
        return  # no attempt has begun to train: there is nothing to come back to
    work = _Work(launch)
    work.start()
    try:
        _wait(work, launch, wait_for)
    except BaseException:
        work.progress.stop.set()
        raise
    if work.failure is not None:
        raise NotStarted(Conclusion(Cause.CHECKPOINT_ERROR, None, None, work.failure))
    for note in work.notes:
        telling.note("checkpoint-fetched" if note.startswith("fetched") else "object-store", note)
    if work.notes:
        leave_notes(paths, work.notes)


def _wait(work: _Work, launch: LaunchFile, wait_for: WaitFor) -> None:
    """Until it is done. The deadline begins again with every byte that comes."""
    seen = -1
    while work.progress.nbytes > seen:
        seen = work.progress.nbytes
        if wait_for(lambda: True if not work.is_alive() else None, time.monotonic() + launch.deadlines.meeting):
            return
    work.progress.stop.set()
    seconds = f"startup_deadline ({launch.deadlines.meeting:g} s)"
    work.failure = f"no checkpoint was had from {launch.spec.checkpoint.uri} within {seconds}: {work.reason}"


class _Work(threading.Thread):
    """Asks and fetches, so that the main thread can hear a stop meanwhile."""

    def __init__(self, launch: LaunchFile) -> None:
        super().__init__(name="fetch", daemon=True)
        self._launch = launch
        self._job = JobPaths(Path(launch.job_root))
        self.progress = Progress()
        self.notes: list[str] = []
        self.failure: str | None = None
        self.reason = "the store did not answer"

    def run(self) -> None:
        try:
            local = newest_local(self._job.checkpoints, self._launch.lineage, self.progress)
            while not self.progress.stop.is_set() and not self._done(local):
                self.progress.stop.wait(_PAUSE)
        except CheckpointError as error:
            say(
                f"nothing is fetched: {error.detail}"
            )  # of this disk: the ranks meet it, and say so with all its context
        except BaseException as error:  # whatever ends this thread, an attempt must not start over for it
            self.failure = f"fetching from the object store failed: {type(error).__name__}: {error}"

    def _done(self, local: tuple[int, int] | None) -> bool:
        launch, uri = self._launch, self._launch.spec.checkpoint.uri
        assert uri is not None
        try:
            remote = open_job(uri, launch.job_id, _PATIENCE)
            found = bring(remote, self._job.checkpoints, self._job.quarantine, launch.lineage, local, self.progress)
        except CheckpointError as error:
            if error.code not in _AWAY:
                self.failure = f"fetching from the object store failed: {error.detail}"
                return True
            if error.detail != self.reason:
                say(f"the object store cannot be asked: {error.detail}")
            self.reason = error.detail
            return self._may_do_without(local)
        self._told(found, local)
        return True

    def _may_do_without(self, local: tuple[int, int] | None) -> bool:
        recorded = self._launch.recorded
        if recorded is not None and (local is None or local < (recorded.step, recorded.epoch or 0)):
            return False
        what = (
            "nothing was committed yet"
            if local is None
            else f"{checkpoint_dir_name(*local)} of this disk is the newest one"
        )
        self.notes.append(f"the object store could not be asked ({self.reason}); by the service's record {what}")
        return True

    def _told(self, found: Brought, local: tuple[int, int] | None) -> None:
        self.notes += found.notes
        if found.fetched is not None:
            self.notes.append(f"fetched from {found.uri}: this disk had {_name(local)}")
        recorded = self._launch.recorded
        newest = (found.fetched.step, found.fetched.epoch) if found.fetched is not None else local
        if recorded is not None and (newest is None or newest < (recorded.step, recorded.epoch or 0)):
            lost = checkpoint_dir_name(recorded.step, recorded.epoch or 0)
            self.notes.append(f"{lost} is recorded as committed, but neither this disk nor the object store has it")


def _name(one: tuple[int, int] | None) -> str:
    return "no checkpoint of the lineage" if one is None else f"nothing newer than {checkpoint_dir_name(*one)}"
