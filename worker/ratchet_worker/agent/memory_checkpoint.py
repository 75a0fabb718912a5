"""Makes a checkpoint of the ranks' newest copies in memory when they have ended early, in the agent of a job of one node."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ratchet_contract import env_vars as names
from ratchet_contract.checkpoint.manifest import FileEntry, Manifest, parse_entries
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import CheckpointError, RatchetError, UserError
from ratchet_contract.paths import DELETED_MANIFEST_NAME, MANIFEST_NAME, AttemptPaths, JobPaths
from ratchet_contract.phases import NoteType
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.messages import CheckpointCommitted, LaunchFile, Note, node_rank
from ratchet_store.filesystem.durable_io import DAMAGED
from ratchet_store.format.manifest_file import ManifestWriter, checkpoint_dirs, read_manifest
from ratchet_store.write.rank_file import write_described
from ratchet_worker.ipc import event_journal, memory_copies
from ratchet_worker.ipc.log_lines import log_message, now
from ratchet_worker.ipc.report_spool import Spool
from ratchet_worker.ipc.save_reports import complete, first_difference


class _Found(NamedTuple):
    """The copies with one number on all ranks, in rank order, and the manifest of a checkpoint of them."""

    copies: list[memory_copies.Copy]
    manifest: Manifest


class MemoryCheckpoint:
    """The copies in memory of one attempt. The file is created here, and freed with this process and the ranks'."""

    def __init__(self, launch: LaunchFile, paths: AttemptPaths) -> None:
        """Raises ``OSError``, and ``UserError`` on a system without such files."""
        self._launch, self._paths, self._job = launch, paths, JobPaths(Path(launch.job_root))
        self._fd: int | None = None
        if launch.spec.checkpoint.memory_every_steps is not None:
            if not hasattr(os, "memfd_create"):
                raise UserError("checkpoint.memory_every_steps needs Linux on the ranks' machine: remove it")
            self._fd = memory_copies.create(launch.world_size)

    def environment(self) -> dict[str, str]:
        """Return the variables with which the ranks find the file; empty if the job has no copies."""
        return {} if self._fd is None else {names.COPIES_FILE: f"/proc/{os.getpid()}/fd/{self._fd}"}

    def commit(self, base: Base | None, last_step: int) -> str:
        """Commit the newest copies that all ranks have as a checkpoint, if they are newer than the attempt's newest checkpoint
        and ``base``, what it started from. Call it once, when all ranks have ended, and not if the attempt is fenced. Returns a
        sentence to append to the attempt's message; empty if there was nothing to do. ``last_step``: the last finished step."""
        number = 0 if self._fd is None else memory_copies.newest(self._fd, self._launch.world_size)
        if self._fd is None or number == 0:
            return ""
        begun = time.monotonic()
        try:
            memory_copies.seal(self._fd)
            found = self._read(self._fd, number)
            parent = self._newest_checkpoint() or base or Base()
            if found.manifest.step <= parent.step:
                return ""
            manifest = self._write(found, parent)
        except (RatchetError, OSError, ValueError) as error:
            text = f"the copies in memory were not used, the newest checkpoint counts: {error}"
            self._note(NoteType.MEMORY_COPIES_UNUSED, text, {})
            return f"; {text}"
        redone = max(0, last_step - manifest.step)
        text = (
            f"step {manifest.step} was saved from the copies in memory: the next attempt continues from it, and does "
            f"{pluralize(redone, 'finished step')} again"
        )
        self._report_committed(manifest, time.monotonic() - begun)
        self._note(NoteType.CHECKPOINT_FROM_MEMORY, text, {"step": manifest.step, "redone": redone})
        return f"; {text}"

    def _read(self, fd: int, number: int) -> _Found:
        """Return the copies with this number. Raises ``CheckpointError`` (``checkpoint-damaged``) if they are damaged, or if
        replicas or steps differ."""
        copies = [memory_copies.read(fd, rank, number) for rank in range(self._launch.world_size)]
        if len({copy.step for copy in copies}) > 1:
            raise CheckpointError(
                f"the ranks have copied different steps: {[copy.step for copy in copies]}", code=DAMAGED
            )
        reports = [copy.description["report"] for copy in copies]
        own = [digests for report in reports for digests in report["parts"]]
        if (odd := first_difference(own, [report["seen"] for report in reports])) is not None:
            raise CheckpointError(
                f"replicas differ: rank {odd.ranks}, part {odd.part} of the shared tensors", code=DAMAGED
            )
        draft = Manifest.model_validate_json(copies[0].description["draft"])
        tensors = [entry for copy in copies for entry in parse_entries(copy.description["listing"])]
        return _Found(copies, complete(draft, reports, tensors))

    def _newest_checkpoint(self) -> Base | None:
        """Return this attempt's newest committed checkpoint on the disk. Raises ``CheckpointError`` if it cannot be listed."""
        for _, attempt, directory in checkpoint_dirs(self._job.checkpoints):
            if attempt == self._launch.attempt:
                with suppress(CheckpointError):  # uncommitted or damaged: an older one is the parent
                    return read_manifest(directory).base
        return None

    def _write(self, found: _Found, parent: Base) -> Manifest:
        """Write the rank files, verified, and commit the manifest; return it with its digest. Raises ``CheckpointError`` and
        ``OSError``."""
        directory = self._job.checkpoint(found.manifest.step, self._launch.attempt)
        if directory.exists() and not any(
            (directory / name).exists() for name in (MANIFEST_NAME, DELETED_MANIFEST_NAME)
        ):
            shutil.rmtree(directory)  # what ranks left of a save of this step
        for copy in found.copies:
            file = FileEntry.model_validate(copy.description["report"]["file"])
            write_described(directory, file, copy.header, copy.data)
        for copy in found.copies:
            for journal, entry in copy.description["files"].items():
                event_journal.append(Path(journal), entry)
        if self._paths.fence_file.exists():  # the next attempt may have chosen its base already
            raise CheckpointError("the service has declared this attempt over: its checkpoints no longer count")
        return ManifestWriter().commit(directory, found.manifest.model_copy(update={"parent": parent}))

    def _report_committed(self, manifest: Manifest, seconds: float) -> None:
        message = CheckpointCommitted(
            rank=node_rank(0), at=now(), step=manifest.step, attempt=manifest.attempt, digest=manifest.digest,
            size=manifest.size, files=len(manifest.files), seconds=seconds, reason=manifest.reason, parent=manifest.parent,
        )  # fmt: skip
        self._append(message)

    def _note(self, kind: NoteType, text: str, data: dict[str, Any]) -> None:
        """Write to the agent's log and add an event to the job's history."""
        log_message(text)
        self._append(Note(rank=node_rank(0), at=now(), type=kind, message=text[:4000], data=data))

    def _append(self, message: CheckpointCommitted | Note) -> None:
        spool = Spool(self._paths.node_spool(0))
        spool.append(message)
        spool.close()
