"""Finds the log files on the disk that a reader requests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from ratchet_contract.paths import JobPaths
from ratchet_service.isolation.file_access import MAX_NAMES, as_owner, names_in

MAX_RANKS: Final = 4096


_MAX_ATTEMPTS: Final = 10_000


_LOG: Final = re.compile(r"rank-(\d{5,6})\.log", re.ASCII)


_ATTEMPT: Final = re.compile(r"\d{4,9}", re.ASCII)


@dataclass(frozen=True)
class LogFilter:
    """What a reader of logs requests; None: no restriction. ``first`` to ``last``: attempts, both included. ``grep``: a text in
    the lines. ``since``: lines written since then, and perhaps earlier ones. ``tail``: the last N lines of each log."""

    first: int = 1
    last: int | None = None
    rank: int | None = None
    grep: str | None = None
    since: datetime | None = None
    tail: int | None = None  # lines of each rank's log


def log_files(job: JobPaths, log_filter: LogFilter) -> list[tuple[int, int, Path]]:
    """Return, within limits, ``(attempt, rank, file)`` of the logs that the filter selects by attempt, rank and ``since``."""
    with as_owner(job.root):
        return _log_files(job, log_filter)


def _log_files(job: JobPaths, log_filter: LogFilter) -> list[tuple[int, int, Path]]:
    """Like ``log_files``, called within ``as_owner``. The result is limited, since user code may have put anything there."""
    out = []
    names = names_in(job.root / "attempts")
    left = MAX_NAMES - len(names)
    numbers = {int(name) for name in names if _ATTEMPT.fullmatch(name)}
    requested = sorted(
        n for n in numbers if log_filter.first <= n and (log_filter.last is None or n <= log_filter.last)
    )
    for attempt in reversed(requested[-_MAX_ATTEMPTS:]):  # the newest first: they matter most if names are left out
        paths = job.attempt(attempt)
        if log_filter.rank is not None:
            ranks = [log_filter.rank]
        else:
            names = names_in(paths.log(0).parent, left)
            left -= len(names)
            ranks = sorted({int(match[1]) for name in names if (match := _LOG.fullmatch(name))})[:MAX_RANKS]
        found = ((attempt, rank, paths.log(rank)) for rank in ranks)
        sure = log_filter.rank is None and log_filter.since is None
        out += [one for one in found if sure or _written_since(one[2], log_filter.since)]
    return sorted(out)


def _written_since(path: Path, since: datetime | None) -> bool:
    """True if the file exists and was last written at or after ``since`` (None: at any time)."""
    try:
        written = path.stat().st_mtime
    except OSError:
        return False
    return since is None or written >= since.timestamp()
