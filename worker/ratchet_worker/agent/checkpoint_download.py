"""Fetches the checkpoint that an attempt starts from, if the object store has a newer one than this disk. While the store cannot
be queried, the attempt starts only if the service has recorded no newer checkpoint than the local one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeVar

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import AttemptPaths, JobPaths, checkpoint_dir_name
from ratchet_contract.phases import Cause, NoteType
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_store.object_store.client import DENIED, NO_CLIENT, REMOTE, Patience
from ratchet_store.object_store.download import FetchResult, Progress, fetch_newest, newest_local
from ratchet_store.object_store.remote_checkpoints import open_job_checkpoints
from ratchet_worker.agent.checkpoint_upload import AgentMessages
from ratchet_worker.ipc.fetch_notes import write_notes
from ratchet_worker.ipc.log_lines import log_message
from ratchet_worker.ipc.result_files import Conclusion, NotStarted

T = TypeVar("T")
_RETRY_SECONDS: Final = 1.0
_UNREACHABLE_CODES: Final = frozenset({REMOTE, DENIED, NO_CLIENT})


class WaitFor(Protocol):
    """The signature of ``Supervisor.wait_for``: returns the first value of ``done`` that is not None, or None at ``deadline``
    (monotonic seconds). Raises ``NotStarted`` if the attempt is over."""

    def __call__(self, done: Callable[[], T | None], deadline: float) -> T | None: ...


def download_checkpoint(launch: LaunchFile, paths: AttemptPaths, wait_for: WaitFor, messages: AgentMessages) -> None:
    """Fetch the newest checkpoint from the object store if it is newer than the local ones; does nothing if the lineage is
    empty. Blocks. Raises ``NotStarted`` if the attempt cannot start or is over."""
    if not launch.lineage:
        return  # no attempt has begun to train: there is no checkpoint to fetch
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
        kind = NoteType.CHECKPOINT_FETCHED if note.startswith("fetched") else NoteType.OBJECT_STORE
        messages.note(kind, note)
    if work.notes:
        write_notes(paths, work.notes)


def _wait(work: _Work, launch: LaunchFile, wait_for: WaitFor) -> None:
    """Wait until ``work`` is done, or set ``work.failure`` after a whole period of ``deadlines.rendezvous`` without a byte read
    or received."""
    seen = -1
    while work.progress.nbytes > seen:
        seen = work.progress.nbytes
        if wait_for(lambda: True if not work.is_alive() else None, time.monotonic() + launch.deadlines.rendezvous):
            return
    work.progress.stop.set()
    seconds = f"startup_deadline ({launch.deadlines.rendezvous:g} s)"
    work.failure = f"no checkpoint was fetched from {launch.spec.checkpoint.uri} within {seconds}: {work.reason}"


def _patience(deadline: float) -> Patience:
    """Return the time limits of requests to the store, each shorter than ``deadline`` (seconds)."""
    return Patience(connect=min(5.0, deadline / 4), request=min(60.0, deadline / 3), retry=min(10.0, deadline / 3))


class _Work(threading.Thread):
    """The thread that queries the store and fetches. ``failure``: why the attempt cannot start; ``notes``: messages for the job's
    history."""

    def __init__(self, launch: LaunchFile) -> None:
        super().__init__(name="fetch", daemon=True)
        self._launch = launch
        self._job = JobPaths(Path(launch.job_root))
        self.progress = Progress()
        self.notes: list[str] = []
        self.failure: str | None = None
        self.reason = "the store did not answer"

    def run(self) -> None:
        """Find the newest local checkpoint, then call ``_try_fetch`` until it is done or the fetch is stopped. A failure is
        stored in ``failure``, except a ``CheckpointError`` of the local search, which the ranks report."""
        try:
            launch = self._launch
            local = newest_local(
                self._job.checkpoints,
                launch.lineage,
                self.progress,
                expected_job_id=launch.job_id,
                root=launch.root_base,
            )
            while not self.progress.stop.is_set() and not self._try_fetch(local):
                self.progress.stop.wait(_RETRY_SECONDS)
        except CheckpointError as error:
            log_message(
                f"nothing is fetched: {error.detail}"
            )  # an error of the local disk: the ranks will hit it, too, and report it with full context
        except BaseException as error:  # no failure of this thread may make the attempt start from scratch
            self.failure = f"fetching from the object store failed: {type(error).__name__}: {error}"

    def _try_fetch(self, local: tuple[int, int] | None) -> bool:
        """Query the store once and fetch what is newer than ``local``. False: try again; True: done, or failed."""
        launch, uri = self._launch, self._launch.spec.checkpoint.uri
        assert uri is not None
        try:
            remote = open_job_checkpoints(uri, launch.job_id, _patience(launch.deadlines.rendezvous))
            found = fetch_newest(
                remote, self._job.checkpoints, self._job.quarantine, launch.lineage, local, self.progress
            )
        except CheckpointError as error:
            if error.code not in _UNREACHABLE_CODES:
                self.failure = f"fetching from the object store failed: {error.detail}"
                return True
            if error.detail != self.reason:
                log_message(f"the object store cannot be queried: {error.detail}")
            self.reason = error.detail
            return self._can_start_from_local(local)
        self._record_result(found, local)
        return True

    def _can_start_from_local(self, local: tuple[int, int] | None) -> bool:
        """True if the service has recorded no newer checkpoint than ``local``, so that the store is not needed. Adds a note
        then."""
        recorded = self._launch.recorded
        if recorded is not None and (local is None or local < (recorded.step, recorded.attempt or 0)):
            return False
        newer = "" if local is None else f" newer than {checkpoint_dir_name(*local)} of this disk"
        self.notes.append(
            f"the object store could not be queried ({self.reason}); the service has recorded no checkpoint{newer}"
        )
        return True

    def _record_result(self, result: FetchResult, local: tuple[int, int] | None) -> None:
        """Add notes on damaged copies in the store, on what was fetched, and on a recorded checkpoint that is lost."""
        self.notes += result.notes
        if result.fetched is not None:
            self.notes.append(f"fetched from {result.uri}: this disk had {_describe_local(local)}")
        recorded = self._launch.recorded
        newest = (result.fetched.step, result.fetched.attempt) if result.fetched is not None else local
        if recorded is not None and (newest is None or newest < (recorded.step, recorded.attempt or 0)):
            lost = checkpoint_dir_name(recorded.step, recorded.attempt or 0)
            self.notes.append(f"{lost} is recorded as committed, but neither this disk nor the object store has it")


def _describe_local(checkpoint: tuple[int, int] | None) -> str:
    """A text for a note about the checkpoint (step, attempt) that the disk had; None: it had none."""
    return (
        "no checkpoint of the lineage"
        if checkpoint is None
        else f"nothing newer than {checkpoint_dir_name(*checkpoint)}"
    )
