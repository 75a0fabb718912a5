"""Which checkpoint an attempt starts from: found by rank 0, read and verified by all ranks together, in one pass over the disk.

Every rank reads what it will need into fresh memory, its own file wholly; in a group of another size the old ranks' files are
dealt out. So every byte of every file is verified by somebody before anything is built on the choice: the bucket layout that the
model is wrapped on comes from the manifest, and bytes that turn out to be damaged must not lie in live tensors. What was read is
held until ``restore`` puts it in: one copy of this rank's state, which has to be there beside the live tensors anyway by then.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ratchet_contract.errors import CheckpointError, RatchetError, UserError
from ratchet_contract.manifest import Manifest
from ratchet_contract.messages import ForkSource, LaunchFile
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_contract.resume import Base
from ratchet_store.commit import check_files, read_manifest
from ratchet_store.files import DAMAGED, MISSING, UNREADABLE, ensure_dir, refresh
from ratchet_store.filesystem import examine
from ratchet_store.lineage import find_base, set_aside
from ratchet_store.read import verify_files
from ratchet_worker.adopted import NOT_LOOKED_AT
from ratchet_worker.exchange import Exchange
from ratchet_worker.fetched import fetched_notes
from ratchet_worker.reporter import Reporter
from ratchet_worker.restore import Chosen, read
from ratchet_worker.snapshot import Snapshot

_PATIENCE: Final = 90.0
"""Seconds in which another node must see what rank 0 sees: an NFS client may believe for ``acdirmax`` (60 s) that a name is not
there (nfs(5), "Data and metadata coherence")."""

Told = dict[str, Any]


def choose(launch: LaunchFile, exchange: Exchange, reporter: Reporter) -> Chosen:
    """The newest checkpoint of the lineage (or the fork's source) whose every byte is right, with this rank's part of it.

    Damaged ones are moved to the quarantine by rank 0, told, and the next older one is tried; all ranks agree on each. Raises
    ``CheckpointError`` where nothing may silently be passed over, ``UserError`` for a fork whose source is damaged: on all ranks.
    """
    side = _RankZero(launch, reporter)
    patience = 0.0 if launch.node == 0 else _PATIENCE
    problems: list[Told | None] = []
    tried = 0
    while True:
        tried += 1
        told = exchange.broadcast(f"base/{tried}", side.next(problems) if exchange.rank == 0 else None)
        if told["error"] is not None:
            raise _error_of(told["error"])
        chosen, problem = Chosen(quarantined=told["quarantined"], notes=told["notes"]), None
        if told["directory"] is None:
            return chosen
        try:
            chosen = _seen(chosen, Path(told["directory"]), told["digest"], patience)
            chosen.held.append(_read_part(chosen, exchange))
        except CheckpointError as error:
            problem = _told(error)
        problems = exchange.gather(f"base/{tried}/read", problem)
        if not any(problems):
            return chosen
        for rank, found in enumerate(problems):
            if found is not None and found["code"] not in (DAMAGED, MISSING):
                raise _error_of({**found, "detail": f"rank {rank}: {found['detail']}"})


def _read_part(chosen: Chosen, exchange: Exchange) -> Snapshot:
    """This rank's state, or in a group of another size that of one old rank; the files that fall to this rank, wholly."""
    assert chosen.manifest is not None
    old = chosen.manifest.world_size
    source = exchange.rank % old
    return read(chosen, [source], whole=range(exchange.rank, old, exchange.world_size))[source]


def _seen(chosen: Chosen, directory: Path, digest: str, patience: float) -> Chosen:
    """``chosen`` with the manifest that rank 0 has found. Where it is not there yet, or not all its files, that is asked for
    again, for ``patience`` seconds. Raises ``CheckpointError``."""
    end = time.monotonic() + patience
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
            if error.code not in (MISSING, DAMAGED) or patience == 0:
                raise
            if time.monotonic() > end:
                raise CheckpointError(
                    f"this node does not see {directory} as rank 0 does, after {patience:.0f} s: {error.detail}. The run "
                    "directory must be the same on all nodes: one shared file system, at the same path",
                    code=UNREADABLE,
                ) from error
        time.sleep(0.2)


class _RankZero:
    """Rank 0's side: what is tried next, and what becomes of what was tried."""

    def __init__(self, launch: LaunchFile, reporter: Reporter) -> None:
        self._launch, self._reporter = launch, reporter
        self._job = JobPaths(Path(launch.job_root))
        self._quarantined: list[str] = []
        self._tried: tuple[Path, Manifest] | None = None

    def next(self, problems: list[Told | None]) -> Told:
        """What all ranks are told: the next candidate, after ``problems`` that they had with the last one, or how it ends."""
        out: Told = {"error": None, "directory": None, "digest": None, "quarantined": self._quarantined, "notes": []}
        try:
            if self._tried is not None:
                self._settle(*self._tried, problems)
            else:
                self._insist_on_disk()
            notes = self._find()
        except RatchetError as error:
            return {**out, "error": _told(error)}
        if self._tried is not None:
            out |= {"directory": str(self._tried[0]), "digest": self._tried[1].digest}
        return {**out, "notes": [*fetched_notes(self._launch), *notes]}

    def _insist_on_disk(self) -> None:
        """Raises ``UserError`` for a file system that cannot keep what a save promises."""
        try:
            ensure_dir(self._job.checkpoints)
            verdict = examine(self._job.checkpoints)
        except OSError as error:  # not for its kind: what it means is said where something is to be read or saved
            self._reporter.note("file-system-not-tried", f"{self._job.checkpoints}: {error.strerror or error}")
            return
        if verdict.status == "refused":
            raise UserError(str(verdict), code="file-system-refused")
        if verdict.status == "noted":
            self._reporter.note("file-system", str(verdict))

    def _find(self) -> list[str]:
        """Sets what is tried next; notes on it."""
        launch, job, fork = self._launch, self._job, self._launch.fork
        manifest, moved = find_base(
            job.checkpoints,
            job.quarantine,
            launch.lineage,
            expected_job_id=launch.job_id,
            root=_root(launch),
            check=check_files,
        )
        for item in moved:
            self._put_aside(item.step, item.epoch, item.error, item.path)
        self._tried = None
        if manifest is not None:
            self._tried = job.checkpoint(manifest.step, manifest.epoch), manifest
            return []
        if fork is not None:
            self._tried = _source(fork)
            if fork.adopted is None:
                return [f"forked from job {self._tried[1].job_id}"]
            return [
                f"adopted from the run in {fork.adopted}, step {fork.step} of its start {fork.epoch}",
                NOT_LOOKED_AT,
            ]
        if not launch.lineage:
            return []
        valid = "valid " if self._quarantined else ""
        return [f"there is no {valid}checkpoint of earlier attempts; the job starts over"]

    def _settle(self, directory: Path, manifest: Manifest, problems: list[Told | None]) -> None:
        """Some rank found damage. It counts where rank 0 finds it, too: what only another node reads wrongly says more about that
        node than about the checkpoint, which may be the last good one."""
        if not (directory / MANIFEST_NAME).exists():  # deleted while it was read
            return
        rank, found = next((r, p) for r, p in enumerate(problems) if p is not None)
        detail = found["detail"] if rank == 0 else _damage(directory, manifest)
        if detail is None:
            raise CheckpointError(
                f"rank {rank} reads other bytes than rank 0, which finds nothing wrong with {directory}: {found['detail']}. Look "
                "at that node's memory, and at what lies between it and the disk; nothing older was chosen in its place",
                code=UNREADABLE,
            )
        if directory.parent != self._job.checkpoints:  # of another job, whose affair it is
            assert self._launch.fork is not None
            raise _unusable(detail, self._launch.fork)
        self._put_aside(manifest.step, manifest.epoch, detail, set_aside(directory, self._job.quarantine))

    def _put_aside(self, step: int, epoch: int, error: str, path: Path) -> None:
        self._reporter.quarantined(step, epoch, error)
        self._quarantined.append(f"{path.name}: {error}")


def _root(launch: LaunchFile) -> Base | None:
    """What the job's first checkpoint descends from. None: not known here, as of a fork that has checkpoints of its own, whose
    source is not named any more."""
    if launch.fork is not None:
        return Base(step=launch.fork.step, epoch=launch.fork.epoch, digest=launch.fork.digest)
    return Base() if min((segment.after_step for segment in launch.lineage), default=0) == 0 else None


def _damage(directory: Path, manifest: Manifest) -> str | None:
    """What is wrong with any byte of it. Raises ``CheckpointError`` where that cannot be told."""
    try:
        verify_files(directory, manifest)
    except CheckpointError as error:
        if error.code != DAMAGED:
            raise
        return error.detail
    return None


def _source(fork: ForkSource) -> tuple[Path, Manifest]:
    directory = JobPaths(Path(fork.job_root)).checkpoint(fork.step, fork.epoch)
    try:
        manifest = read_manifest(directory)
        if manifest.digest != fork.digest:
            raise CheckpointError(f"{directory} is not the checkpoint that the job was forked from")
        check_files(directory, manifest)
    except CheckpointError as error:
        if error.code in (MISSING, DAMAGED):
            raise _unusable(error.detail, fork) from error
        raise
    return directory, manifest


def _unusable(detail: str, fork: ForkSource) -> UserError:
    what, cure = "the source of the fork", "fork from another checkpoint"
    if fork.adopted is not None:
        what, cure = f"the copy of what was adopted from {fork.adopted}", "submit the job again, with --adopt"
    return UserError(f"{what} cannot be used: {detail}; {cure}")


def _told(error: RatchetError) -> Told:
    return {"detail": error.detail, "code": error.code, "user": isinstance(error, UserError)}


def _error_of(told: Told) -> RatchetError:
    return (UserError if told["user"] else CheckpointError)(told["detail"], code=told["code"])
