"""What a run without a service has left in its directory, which is laid out as a job's (``JobPaths``): read, and copied for a job
that adopts it. Nothing here changes the directory."""

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

from ratchet_contract.errors import CheckpointError
from ratchet_contract.lineage import lineage
from ratchet_contract.manifest import Manifest
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import (
    CHANGED_NAME,
    FINISHED_NAME,
    MANIFEST_NAME,
    RUN_MARK_NAME,
    JobPaths,
    NodePaths,
    is_job_id,
)
from ratchet_contract.resume import Base
from ratchet_contract.step_ring import RING_ATTEMPTS
from ratchet_store.commit import check_files
from ratchet_store.files import MISSING, fsync_dir, open_regular
from ratchet_store.lineage import find_base
from ratchet_store.read import verify_files

_MOST: Final = 16 << 20
"""Bytes of a file that is read whole."""


class RunDirectory:
    """``allowed``: may the open file of this descriptor be read? It is asked of each."""

    def __init__(self, paths: JobPaths, allowed: Callable[[int], bool] = lambda fd: True) -> None:
        self._paths, self._allowed = paths, allowed

    @property
    def mark(self) -> Path:
        return self._paths.root / RUN_MARK_NAME

    def id(self) -> str | None:
        """The run's; None: it is no directory of a run."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            found = json.loads(self._read(self.mark))["id"]
            return str(found) if is_job_id(found) else None
        return None

    def numbers(self) -> Iterator[int]:
        """Of all starts, in no order."""
        folder = self._paths.root / "attempts"
        if folder.is_dir():
            yield from (int(path.name) for path in folder.iterdir() if path.name.isascii() and path.name.isdigit())

    def bases(self) -> dict[int, Base]:
        """What each start began from; of those that ended before they trained there is nothing."""
        found = {}
        for number in self.numbers():
            with suppress(OSError, ValidationError):
                found[number] = Base.model_validate_json(self._read(self._paths.attempt(number).base_file))
        return found

    def launch(self, number: int) -> LaunchFile | None:
        """What a start was given; None: that cannot be read."""
        with suppress(OSError, ValidationError):
            return LaunchFile.model_validate_json(self._read(self._paths.attempt(number).launch_file))
        return None

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """No start of the script is at work until the block ends. Raises ``BlockingIOError`` where one is."""
        try:
            fd = self._open(NodePaths(self._paths.root).lock_file)
        except FileNotFoundError:  # nobody has started it where this copy lies
            yield
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)

    def newest(self) -> Manifest:
        """Of the checkpoint that the next start would go on from. Raises ``CheckpointError``: ``checkpoint-missing`` where there
        is none, and for a damaged one: nothing older takes its place."""
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

    def copy(self, manifest: Manifest, target: JobPaths) -> None:
        """The checkpoint, verified and durable, and what the run has noted of steps behind it, for the replay proof. Raises
        ``CheckpointError`` for a damaged one, ``OSError``."""
        source, place = (paths.checkpoint(manifest.step, manifest.epoch) for paths in (self._paths, target))
        for name in (*(file.name for file in manifest.files), MANIFEST_NAME):
            self._copy(source / name, place / name)
        for mark in (FINISHED_NAME, CHANGED_NAME):
            with suppress(FileNotFoundError):
                self._copy(source / mark, place / mark)
        verify_files(place, manifest)
        later = sorted(number for number in self.numbers() if number >= manifest.epoch)
        for number in {*later[-RING_ATTEMPTS:], manifest.epoch}:
            theirs, ours = self._paths.attempt(number), target.attempt(number)
            ours.root.mkdir(parents=True, exist_ok=True)
            for rank in range(manifest.world_size):
                with suppress(FileNotFoundError):
                    self._copy(theirs.counter(rank), ours.counter(rank))
                    self._copy(theirs.ring(rank), ours.ring(rank))
        for folder in (place, target.checkpoints, target.root, target.root.parent):
            fsync_dir(folder)

    def _copy(self, source: Path, target: Path) -> None:
        with os.fdopen(self._open(source), "rb") as file:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                shutil.copyfileobj(file, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())

    def _read(self, path: Path) -> bytes:
        with os.fdopen(self._open(path), "rb") as file:
            return file.read(_MOST)

    def _open(self, path: Path) -> int:
        fd = open_regular(path)
        if not self._allowed(fd):
            os.close(fd)
            raise PermissionError(f"{path} leads to another place")
        return fd
