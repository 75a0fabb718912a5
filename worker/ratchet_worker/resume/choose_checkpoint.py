"""Chooses the checkpoint that an attempt starts from. Rank 0 finds it; all ranks together verify every byte of it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ratchet_contract.atomic_write import ensure_dir
from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.errors import CheckpointError, RatchetError, UserError
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_contract.phases import NoteType
from ratchet_contract.protocol.messages import ForkSource, LaunchFile
from ratchet_store.filesystem.durable_io import DAMAGED, MISSING, UNREADABLE, read_error, refresh
from ratchet_store.filesystem.mount_policy import check_directory
from ratchet_store.format.manifest_file import check_files, read_manifest
from ratchet_store.read.checkpoint_reader import verify_files
from ratchet_store.read.find_base import find_base, move_to_quarantine
from ratchet_worker.coordination.reporter import Reporter
from ratchet_worker.coordination.store_exchange import Exchange
from ratchet_worker.ipc.fetch_notes import read_notes
from ratchet_worker.resume.adopted_run import UNCHECKED_NOTE
from ratchet_worker.resume.read_checkpoint import Chosen, read
from ratchet_worker.state.snapshot import Snapshot

_VISIBILITY_TIMEOUT: Final = 90.0
"""Seconds within which another node must see what rank 0 sees: an NFS client may cache for ``acdirmax`` (60 s) that a name does
not exist (nfs(5), "Data and metadata coherence")."""

Message = dict[str, Any]


def choose(launch: LaunchFile, exchange: Exchange, reporter: Reporter) -> Chosen:
    """Return what the attempt starts from: the newest undamaged checkpoint of its lineage, else a fork's source, else nothing.
    All ranks must call it. Moves damaged checkpoints to quarantine. Raises ``CheckpointError`` or ``UserError``, on all ranks."""
    side = _RankZero(launch, reporter)
    timeout = 0.0 if launch.node == 0 else _VISIBILITY_TIMEOUT
    problems: list[Message | None] = []
    tried = 0
    while True:
        tried += 1
        message = exchange.broadcast(f"base/{tried}", side.next_candidate(problems) if exchange.rank == 0 else None)
        if message["error"] is not None:
            raise _error_from_message(message["error"])
        chosen, problem = Chosen(quarantined=message["quarantined"], notes=message["notes"]), None
        if message["directory"] is None:
            return chosen
        try:
            chosen = _read_visible(chosen, Path(message["directory"]), message["digest"], timeout)
            chosen.loaded.append(_read_part(chosen, exchange))
        except CheckpointError as error:
            problem = _error_message(error)
        problems = exchange.gather(f"base/{tried}/read", problem)
        if not any(problems):
            return chosen
        for rank, found in enumerate(problems):
            if found is not None and found["code"] not in (DAMAGED, MISSING):
                raise _error_from_message({**found, "detail": f"rank {rank}: {found['detail']}"})


def choose_in_background(launch: LaunchFile, exchange: Exchange, reporter: Reporter) -> Future[Chosen]:
    """Call ``choose`` in a thread of its own, and return its result or error as a future. Until this is done, only that thread
    may use ``exchange`` and its client of the store."""
    future: Future[Chosen] = Future()

    def run() -> None:
        try:
            future.set_result(choose(launch, exchange, reporter))
        except BaseException as error:  # raised where the result is needed
            future.set_exception(error)

    threading.Thread(target=run, name="ratchet-resume", daemon=True).start()
    return future


def _read_part(chosen: Chosen, exchange: Exchange) -> Snapshot:
    """Return the state that this rank saved in the checkpoint, and verify a part of the files. A rank that the old group did not
    have gets the state of an old rank."""
    assert chosen.manifest is not None
    old = chosen.manifest.world_size
    source = exchange.rank % old
    return read(chosen, [source], verified_ranks=range(exchange.rank, old, exchange.world_size))[source]


def _read_visible(chosen: Chosen, directory: Path, digest: str, timeout: float) -> Chosen:
    """Return ``chosen`` with the checkpoint in ``directory``, whose manifest must have ``digest``. If this node does not see that
    checkpoint yet, retries for ``timeout`` seconds. Raises ``CheckpointError`` if it stays invisible or damaged, is
    another one, or cannot be read."""
    end = time.monotonic() + timeout
    while True:
        for folder in (directory.parent, directory):
            refresh(folder)
        try:
            manifest = read_manifest(directory)
            if manifest.digest != digest:
                raise CheckpointError(f"{directory} changed while the ranks agreed on it")
            check_files(directory, manifest)
            return replace(chosen, base=manifest.base, manifest=manifest, directory=directory)
        except CheckpointError as error:
            if error.code not in (MISSING, DAMAGED) or timeout == 0:
                raise
            if time.monotonic() > end:
                raise CheckpointError(
                    f"this node does not see {directory} as rank 0 does, after {timeout:.0f} s: {error.detail}. The run "
                    "directory must be the same on all nodes: one shared file system, at the same path",
                    code=UNREADABLE,
                ) from error
        time.sleep(0.2)


class _RankZero:
    """Rank 0's side of ``choose``: selects the next checkpoint to try, and handles a damaged one."""

    def __init__(self, launch: LaunchFile, reporter: Reporter) -> None:
        self._launch, self._reporter = launch, reporter
        self._job = JobPaths(Path(launch.job_root))
        self._quarantined: list[str] = []
        self._candidate: tuple[Path, Manifest] | None = None

    def next_candidate(self, problems: list[Message | None]) -> Message:
        """Return the message to all ranks: the next checkpoint to try, if any, or an error. ``problems``: damage of the previous
        one, by rank."""
        out: Message = {"error": None, "directory": None, "digest": None, "quarantined": self._quarantined, "notes": []}
        try:
            if self._candidate is not None:
                self._handle_damage(*self._candidate, problems)
            else:
                self._check_file_system()
            notes = self._find()
        except RatchetError as error:
            return {**out, "error": _error_message(error)}
        except OSError as error:  # from the check whether a file exists; the other ranks wait for an answer
            return {**out, "error": _error_message(read_error(Path(error.filename or self._job.checkpoints), error))}
        if self._candidate is not None:
            out |= {"directory": str(self._candidate[0]), "digest": self._candidate[1].digest}
        return {**out, "notes": [*read_notes(self._launch), *notes]}

    def _check_file_system(self) -> None:
        """Create the directory of checkpoints. Raises ``UserError`` if its file system cannot provide the durability that a save
        promises."""
        try:
            ensure_dir(self._job.checkpoints)
            verdict = check_directory(self._job.checkpoints)
        except OSError as error:  # no verdict on its kind; the next read or save reports the error's effect
            self._reporter.note(NoteType.FILE_SYSTEM_NOT_TRIED, f"{self._job.checkpoints}: {error.strerror or error}")
            return
        if verdict.status == "refused":
            raise UserError(str(verdict), code="file-system-refused")
        if verdict.status == "noted":
            self._reporter.note(NoteType.FILE_SYSTEM, str(verdict))

    def _find(self) -> list[str]:
        """Find the next candidate, and return notes on it. Moves damaged checkpoints to quarantine. Raises ``CheckpointError``,
        ``UserError``."""
        launch, job, fork = self._launch, self._job, self._launch.fork
        manifest, moved = find_base(
            job.checkpoints,
            job.quarantine,
            launch.lineage,
            expected_job_id=launch.job_id,
            root=launch.root_base,
            check=check_files,
        )
        for item in moved:
            self._report_quarantined(item.step, item.attempt, item.error, item.path)
        self._candidate = None
        if manifest is not None:
            self._candidate = job.checkpoint(manifest.step, manifest.attempt), manifest
            return []
        if fork is not None:
            self._candidate = _read_fork_source(fork)
            if fork.adopted is None:
                return [f"forked from job {self._candidate[1].job_id}"]
            return [
                f"adopted from the run in {fork.adopted}, step {fork.step} of its start {fork.attempt}",
                UNCHECKED_NOTE,
            ]
        if not launch.lineage:
            return []
        valid = "valid " if self._quarantined else ""
        return [f"there is no {valid}checkpoint of earlier attempts; the job starts over"]

    def _handle_damage(self, directory: Path, manifest: Manifest, problems: list[Message | None]) -> None:
        """Move the candidate, in which some rank has found damage, to quarantine, unless it was deleted meanwhile. Raises
        ``CheckpointError`` or ``UserError`` if it stays."""
        if not (directory / MANIFEST_NAME).exists():  # deleted while it was read
            return
        rank, found = next((r, p) for r, p in enumerate(problems) if p is not None)
        detail = found["detail"] if rank == 0 else _find_damage(directory, manifest)
        # The other rank's node is suspect, not the checkpoint, which may be the last good one.
        if detail is None:
            raise CheckpointError(
                f"rank {rank} reads other bytes than rank 0, which finds nothing wrong with {directory}: {found['detail']}. "
                "Check that node's memory, and its path to the disk; no older checkpoint was used instead",
                code=UNREADABLE,
            )
        if directory.parent != self._job.checkpoints:  # another job's checkpoint must not be quarantined here
            assert self._launch.fork is not None
            raise _unusable_source(detail, self._launch.fork)
        self._report_quarantined(
            manifest.step, manifest.attempt, detail, move_to_quarantine(directory, self._job.quarantine)
        )

    def _report_quarantined(self, step: int, attempt: int, error: str, path: Path) -> None:
        """Report a checkpoint that was moved to ``path``, and list it for the resume report."""
        self._reporter.report_quarantined(step, attempt, error)
        self._quarantined.append(f"{path.name}: {error}")


def _find_damage(directory: Path, manifest: Manifest) -> str | None:
    """Verify every byte of a checkpoint. Returns a description of the damage, or None. Raises ``CheckpointError`` if a file
    cannot be read."""
    try:
        verify_files(directory, manifest)
    except CheckpointError as error:
        if error.code != DAMAGED:
            raise
        return error.detail
    return None


def _read_fork_source(fork: ForkSource) -> tuple[Path, Manifest]:
    """Return directory and manifest of the checkpoint that ``fork`` names. Raises ``UserError`` if unusable, ``CheckpointError``
    if unreadable."""
    directory = JobPaths(Path(fork.job_root)).checkpoint(fork.step, fork.attempt)
    try:
        manifest = read_manifest(directory)
        if manifest.digest != fork.digest:
            raise CheckpointError(f"{directory} is not the checkpoint that the job was forked from")
        check_files(directory, manifest)
    except CheckpointError as error:
        if error.code in (MISSING, DAMAGED):
            raise _unusable_source(error.detail, fork) from error
        raise
    return directory, manifest


def _unusable_source(detail: str, fork: ForkSource) -> UserError:
    """Return the error for a checkpoint that a fork starts from, if it is damaged or missing. The checkpoint may also be the copy
    of an adopted run."""
    what, cure = "the source of the fork", "fork from another checkpoint"
    if fork.adopted is not None:
        what, cure = f"the copy of the run adopted from {fork.adopted}", "submit the job again, with --adopt"
    return UserError(f"{what} cannot be used: {detail}; {cure}")


def _error_message(error: RatchetError) -> Message:
    """Return ``error`` as JSON, for all ranks. Inverse of ``_error_from_message``."""
    return {"detail": error.detail, "code": error.code, "user": isinstance(error, UserError)}


def _error_from_message(message: Message) -> RatchetError:
    return (UserError if message["user"] else CheckpointError)(message["detail"], code=message["code"])
