"""Logs, spools and fingerprints of ended attempts, bounded for the job: one that is stopped often must not fill the disk."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from sqlalchemy.orm import Session

from ratchet_contract.paths import JobPaths
from ratchet_contract.step_ring import RING_ATTEMPTS
from ratchet_service.bounds import Bounds
from ratchet_service.file_owner import as_owner, names_in
from ratchet_service.models import Job
from ratchet_service.transitions import add_event
from ratchet_service.usecases.logs import LogFilter, log_files
from ratchet_store.holes import GRANULE, punch

KEPT: Final = GRANULE
"""Bytes at the beginning and at the end that each log keeps, at the least."""


class Shortened(NamedTuple):
    """``attempts`` lost the middle of their logs; ``removed``: all of it, since the file system cannot free a middle."""

    attempts: list[int]
    removed: bool
    nbytes: int


def shorten(paths: JobPaths, epoch: int, bounds: Bounds) -> Shortened | None:
    """Bound the logs up to attempt ``epoch``, which is dead; None where there is nothing to do. The first and the last
    ``bounds.log_attempts`` keep theirs, of the others the oldest go first. What the system refuses stays, and is tried again at
    the next attempt's end."""
    with as_owner(paths.root):
        return _bounded(paths, epoch, bounds)


def _bounded(paths: JobPaths, epoch: int, bounds: Bounds) -> Shortened | None:
    by_attempt: dict[int, list[Path]] = defaultdict(list)
    for attempt, _, path in log_files(paths, LogFilter(last=epoch)):
        by_attempt[attempt].append(path)
    excess = sum(_used(path) for found in by_attempt.values() for path in found) - bounds.job_log_bytes
    done, removed, freed = list[int](), False, 0
    for attempt in sorted(by_attempt)[bounds.log_attempts : -bounds.log_attempts]:
        if freed >= excess:
            break
        before = freed
        for path in by_attempt[attempt]:
            try:
                freed += _shorten(path)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    freed, removed = freed + _used(path), True
                    path.unlink(missing_ok=True)
        if freed > before:
            done.append(attempt)
    return Shortened(done, removed, freed) if done else None


def drop_spools(paths: JobPaths, epoch: int, bounds: Bounds) -> None:
    """Of attempts before the last ``bounds.log_attempts`` up to ``epoch``: each was stored to its end when its attempt ended. And
    the rings of fingerprints that no attempt looks at any more."""
    with as_owner(paths.root):
        attempts = paths.attempt(0).root.parent
        for attempt in names_in(attempts):
            if not attempt.isdigit():
                continue
            if int(attempt) <= epoch - bounds.log_attempts:
                _drop(attempts / attempt / "spool", ".jsonl")
            if int(attempt) <= epoch - RING_ATTEMPTS:
                _drop(attempts / attempt / "fingerprints", ".bin")


def _drop(folder: Path, suffix: str) -> None:
    for name in names_in(folder):
        if name.endswith(suffix):
            with suppress(OSError):
                (folder / name).unlink()


def tell(session: Session, job: Job, epoch: int, shortened: Shortened | None) -> None:
    """In the job's history; the job's row is held."""
    if shortened is None:
        return
    attempts = ", ".join(map(str, shortened.attempts))
    what = "were removed" if shortened.removed else f"keep {KEPT >> 10} KiB at their beginning and at their end"
    data = {"attempts": shortened.attempts, "bytes": shortened.nbytes, "removed": shortened.removed}
    add_event(session, job.id, "logs-shortened", f"logs of attempts {attempts} {what}", epoch=epoch, data=data)


def _used(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _shorten(path: Path) -> int:
    found = path.stat()
    freed = punch(path, KEPT, found.st_size - KEPT)
    if freed:  # when it was written to last is when its attempt wrote to it
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    return freed
