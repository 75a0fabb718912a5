"""Read the directory of a run without a service, and copy a checkpoint from it into a job's directory."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from ratchet_contract.atomic_write import fsync_path
from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.checkpoint.step_ring import RING_ATTEMPTS
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import (
    CHANGED_NAME,
    FINISHED_NAME,
    MANIFEST_NAME,
    RUN_MARK_NAME,
    JobPaths,
    NodePaths,
    is_job_id,
    parse_attempt_dir_name,
)
from ratchet_contract.protocol.lineage import lineage
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_store.filesystem.durable_io import MISSING, open_regular
from ratchet_store.format.manifest_file import check_files
from ratchet_store.read.checkpoint_reader import verify_files
from ratchet_store.read.find_base import find_base

_MAX_BYTES: Final = 16 << 20
"""Maximum bytes read of a file that is read at once."""


class RunDirectory:
    """The directory of a run without a service, read only. ``is_allowed(fd)``: returns True if the open file may be read. This
    is not checked for the manifests that ``newest_manifest`` reads."""

    def __init__(self, paths: JobPaths, is_allowed: Callable[[int], bool] = lambda fd: True) -> None:
        self._paths, self._is_allowed = paths, is_allowed

    @property
    def mark(self) -> Path:
        """Path of the file that marks the directory as a run's, and contains the run's id."""
        return self._paths.root / RUN_MARK_NAME

    def id(self) -> str | None:
        """Return the run's id; None if the mark file is missing, unreadable or without a valid id."""
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            found = json.loads(self._read(self.mark))["id"]
            return str(found) if is_job_id(found) else None
        return None

    def attempt_numbers(self) -> Iterator[int]:
        """Yield the attempt numbers of all starts of the script that have a directory, in no order."""
        folder = self._paths.root / "attempts"
        if folder.is_dir():
            yield from (n for path in folder.iterdir() if (n := parse_attempt_dir_name(path.name)) is not None)

    def bases(self) -> dict[int, Base]:
        """Return, by attempt number, the ``Base`` from which each start of the script began: a checkpoint, or step 0 for a
        start from scratch. Starts whose file cannot be read are left out."""
        found = {}
        for number in self.attempt_numbers():
            with suppress(OSError, ValidationError):
                found[number] = Base.model_validate_json(self._read(self._paths.attempt(number).base_file))
        return found

    def launch_file(self, number: int) -> LaunchFile | None:
        """Return the launch file of the start with that attempt number; None if it cannot be read."""
        with suppress(OSError, ValidationError):
            return LaunchFile.model_validate_json(self._read(self._paths.attempt(number).launch_file))
        return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager: hold a shared lock, if there is a lock file, so that no start of the script runs meanwhile. Raises
        ``BlockingIOError`` if one is running, or another ``OSError``."""
        try:
            fd = self._open(NodePaths(self._paths.root).lock_file)
        except FileNotFoundError:  # no run was ever started in this copy
            yield
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)

    def newest_manifest(self) -> Manifest:
        """Return the manifest of the newest checkpoint that the next start may continue from; the bytes of rank files are not
        read. Raises ``CheckpointError`` if there is none or the newest cannot be used, ``OSError``, and as ``lineage``."""
        # these manifests are read without ``is_allowed``
        found, _ = find_base(
            self._paths.checkpoints,
            None,
            lineage(self.bases()),
            expected_job_id=self.id(),
            root=Base(),
            check=check_files,
        )
        if found is None:
            raise CheckpointError(f"{self._paths.root} has no checkpoint", code=MISSING)
        return found

    def copy_checkpoint(self, manifest: Manifest, target: JobPaths) -> None:
        """Copy the checkpoint of ``manifest`` durably into the directory of the job ``target``, and verify it; some step counters
        and fingerprints are copied too. Raises ``CheckpointError`` or ``OSError``; what was copied then stays."""
        source, place = (paths.checkpoint(manifest.step, manifest.attempt) for paths in (self._paths, target))
        for name in (*(file.name for file in manifest.files), MANIFEST_NAME):
            self._copy(source / name, place / name)
        for mark in (FINISHED_NAME, CHANGED_NAME):
            with suppress(FileNotFoundError):
                self._copy(source / mark, place / mark)
        verify_files(place, manifest)
        later = sorted(number for number in self.attempt_numbers() if number >= manifest.attempt)
        for number in {*later[-RING_ATTEMPTS:], manifest.attempt}:
            theirs, ours = self._paths.attempt(number), target.attempt(number)
            ours.root.mkdir(parents=True, exist_ok=True)
            for rank in range(manifest.world_size):
                with suppress(FileNotFoundError):
                    self._copy(theirs.counter(rank), ours.counter(rank))
                    self._copy(theirs.ring(rank), ours.ring(rank))
        for folder in (place, target.checkpoints, target.root, target.root.parent):
            fsync_path(folder)

    def _copy(self, source: Path, target: Path) -> None:
        """Copy one file and sync the copy; missing parents of ``target`` are created. Raises ``FileExistsError`` if ``target``
        exists."""
        with os.fdopen(self._open(source), "rb") as file:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                shutil.copyfileobj(file, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())

    def _read(self, path: Path) -> bytes:
        """Return up to the first ``_MAX_BYTES`` bytes of a file. Raises ``OSError``."""
        with os.fdopen(self._open(path), "rb") as file:
            return file.read(_MAX_BYTES)

    def _open(self, path: Path) -> int:
        """Return a descriptor of a regular file, which the caller must close. Raises ``OSError``, such as ``PermissionError`` if
        ``is_allowed`` refuses."""
        fd = open_regular(path)
        if not self._is_allowed(fd):
            os.close(fd)
            raise PermissionError(f"{path} leads out of the directories that may be read")
        return fd
