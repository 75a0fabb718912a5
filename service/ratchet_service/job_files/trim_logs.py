"""Limits the logs, spools and fingerprints of ended attempts: a job that is stopped often must not fill the disk."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from sqlalchemy.orm import Session

from ratchet_contract.checkpoint.step_ring import RING_ATTEMPTS
from ratchet_contract.paths import JobPaths, parse_attempt_dir_name
from ratchet_contract.phases import EventType
from ratchet_service.config.output_limits import Bounds
from ratchet_service.db.models import Job
from ratchet_service.db.transitions import add_event
from ratchet_service.isolation.file_access import as_owner, names_in
from ratchet_service.job_files.log_files import LogFilter, log_files
from ratchet_store.filesystem.sparse import GRANULE, punch_hole

KEPT_BYTES: Final = GRANULE
"""Minimum bytes that each log keeps at its beginning and at its end."""


class Shortened(NamedTuple):
    """Result of ``shorten``. ``attempts``: attempts whose logs were shortened or deleted; ``removed``: logs were deleted as a
    whole; ``nbytes``: bytes freed; ``kept``: logs lost only their middle."""

    attempts: list[int]
    removed: bool
    nbytes: int
    kept: bool


def shorten(paths: JobPaths, attempt: int, bounds: Bounds) -> Shortened | None:
    """If the job's logs up to attempt ``attempt`` take too much disk, shorten or delete some, oldest first, and return what was
    done; None if nothing was freed. The first and last ``bounds.log_attempts`` attempts keep theirs. No process of these attempts
    may be alive."""
    with as_owner(paths.root):
        return _shorten_all(paths, attempt, bounds)


def _shorten_all(paths: JobPaths, attempt: int, bounds: Bounds) -> Shortened | None:
    """Like ``shorten``; called within ``as_owner``."""
    by_attempt: dict[int, list[Path]] = defaultdict(list)
    for number, _, path in log_files(paths, LogFilter(last=attempt)):
        by_attempt[number].append(path)
    excess = sum(_allocated_bytes(path) for found in by_attempt.values() for path in found) - bounds.job_log_bytes
    done, removed, kept, freed = list[int](), False, False, 0
    for number in sorted(by_attempt)[bounds.log_attempts : -bounds.log_attempts]:
        if freed >= excess:
            break
        before = freed
        for path in by_attempt[number]:
            try:
                nbytes = _shorten(path)
                freed, kept = freed + nbytes, kept or nbytes > 0
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    nbytes = _allocated_bytes(path)
                    with suppress(OSError):
                        path.unlink()
                        freed, removed = freed + nbytes, True
        if freed > before:
            done.append(number)
    return Shortened(done, removed, freed, kept) if done else None


def drop_spools(paths: JobPaths, attempt: int, bounds: Bounds) -> None:
    """Delete the spools of attempts up to number ``attempt`` - ``bounds.log_attempts``, and the step fingerprints of those up to
    ``attempt`` - ``RING_ATTEMPTS``. Failed deletions are ignored."""
    with as_owner(paths.root), suppress(OSError):
        attempts = paths.attempt(0).root.parent
        for name in names_in(attempts):
            number = parse_attempt_dir_name(name)
            if number is None:
                continue
            if number <= attempt - bounds.log_attempts:
                _drop(attempts / name / "spool", ".jsonl")
            if number <= attempt - RING_ATTEMPTS:
                _drop(attempts / name / "fingerprints", ".bin")


def _drop(folder: Path, suffix: str) -> None:
    """Delete the files in ``folder`` whose names end with ``suffix``; errors of a deletion are ignored."""
    for name in names_in(folder):
        if name.endswith(suffix):
            with suppress(OSError):
                (folder / name).unlink()


def record_event(session: Session, job: Job, attempt: int, shortened: Shortened | None) -> None:
    """Add an event to the job's history that says which logs were shortened, if any. The caller has locked the job's row."""
    if shortened is None:
        return
    attempts = ", ".join(map(str, shortened.attempts))
    kept = f"keep {KEPT_BYTES >> 10} KiB at their beginning and at their end"
    texts = (("were removed", shortened.removed), (kept, shortened.kept))
    what = " or ".join(text for text, applies in texts if applies)
    data = {"attempts": shortened.attempts, "bytes": shortened.nbytes, "removed": shortened.removed}
    add_event(
        session, job.id, EventType.LOGS_SHORTENED, f"logs of attempts {attempts} {what}", attempt=attempt, data=data
    )


def _allocated_bytes(path: Path) -> int:
    """Return the bytes that the file takes on the disk; 0 if it does not exist or cannot be accessed."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _shorten(path: Path) -> int:
    """Delete the middle of the log, keeping the file's times, and return the number of bytes freed. Raises ``OSError``."""
    found = path.stat()
    freed = punch_hole(path, KEPT_BYTES, found.st_size - KEPT_BYTES)
    if freed:  # keep the time of the attempt's last write
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    return freed
