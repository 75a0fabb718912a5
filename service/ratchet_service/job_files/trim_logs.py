"""Limit the logs, spools and fingerprints of ended attempts: a job that is stopped often must not fill the disk."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from sqlalchemy.orm import Session

from ratchet_contract.checkpoint.step_ring import RING_ATTEMPTS
from ratchet_contract.paths import JobPaths
from ratchet_service.config.output_limits import Bounds
from ratchet_service.db.models import Job
from ratchet_service.db.transitions import add_event
from ratchet_service.isolation.file_access import as_owner, names_in
from ratchet_service.job_files.log_files import LogFilter, log_files
from ratchet_store.filesystem.sparse import GRANULE, punch_hole

KEPT_BYTES: Final = GRANULE
"""Minimum bytes that each log keeps at its beginning and at its end."""


class Shortened(NamedTuple):
    """``attempts``: those whose logs lost their middle; ``removed``: whole logs, since the file system cannot free a middle."""

    attempts: list[int]
    removed: bool
    nbytes: int


def shorten(paths: JobPaths, attempt: int, bounds: Bounds) -> Shortened | None:
    """Limit the logs up to attempt ``attempt``, which is dead; None if there is nothing to do. The first and the last
    ``bounds.log_attempts`` attempts keep theirs; of the others the oldest are shortened first. What the system refuses stays, and
    is retried at the next attempt's end."""
    with as_owner(paths.root):
        return _shorten_all(paths, attempt, bounds)


def _shorten_all(paths: JobPaths, attempt: int, bounds: Bounds) -> Shortened | None:
    by_attempt: dict[int, list[Path]] = defaultdict(list)
    for number, _, path in log_files(paths, LogFilter(last=attempt)):
        by_attempt[number].append(path)
    excess = sum(_allocated_bytes(path) for found in by_attempt.values() for path in found) - bounds.job_log_bytes
    done, removed, freed = list[int](), False, 0
    for number in sorted(by_attempt)[bounds.log_attempts : -bounds.log_attempts]:
        if freed >= excess:
            break
        before = freed
        for path in by_attempt[number]:
            try:
                freed += _shorten(path)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    freed, removed = freed + _allocated_bytes(path), True
                    path.unlink(missing_ok=True)
        if freed > before:
            done.append(number)
    return Shortened(done, removed, freed) if done else None


def drop_spools(paths: JobPaths, attempt: int, bounds: Bounds) -> None:
    """Delete the spools of attempts before the last ``bounds.log_attempts`` up to ``attempt``, each of which was stored
    completely when its attempt ended, and the rings of fingerprints that no attempt reads any more."""
    with as_owner(paths.root):
        attempts = paths.attempt(0).root.parent
        for name in names_in(attempts):
            if not name.isdigit():
                continue
            if int(name) <= attempt - bounds.log_attempts:
                _drop(attempts / name / "spool", ".jsonl")
            if int(name) <= attempt - RING_ATTEMPTS:
                _drop(attempts / name / "fingerprints", ".bin")


def _drop(folder: Path, suffix: str) -> None:
    for name in names_in(folder):
        if name.endswith(suffix):
            with suppress(OSError):
                (folder / name).unlink()


def record_event(session: Session, job: Job, attempt: int, shortened: Shortened | None) -> None:
    """Record it in the job's history; the job's row is locked."""
    if shortened is None:
        return
    attempts = ", ".join(map(str, shortened.attempts))
    what = "were removed" if shortened.removed else f"keep {KEPT_BYTES >> 10} KiB at their beginning and at their end"
    data = {"attempts": shortened.attempts, "bytes": shortened.nbytes, "removed": shortened.removed}
    add_event(session, job.id, "logs-shortened", f"logs of attempts {attempts} {what}", attempt=attempt, data=data)


def _allocated_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _shorten(path: Path) -> int:
    found = path.stat()
    freed = punch_hole(path, KEPT_BYTES, found.st_size - KEPT_BYTES)
    if freed:  # keep the time of the attempt's last write
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    return freed
