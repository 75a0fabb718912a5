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
    """What a reader of logs requests; None in a field: no restriction. ``first`` to ``last``: the attempts, both included.
    ``rank``: one rank. ``grep``: only lines that contain this text, which is no pattern. ``tail``: the last N lines of each
    rank's log. ``since``: lines written since then, and up to six seconds before (``ratchet_contract.protocol.log_index``); lines
    without a time count by the time of the last write to their file."""

    first: int = 1
    last: int | None = None
    rank: int | None = None
    grep: str | None = None
    since: datetime | None = None
    tail: int | None = None  # lines of each rank's log


def log_files(job: JobPaths, log_filter: LogFilter) -> list[tuple[int, int, Path]]:
    """Return ``(attempt, rank, file)`` of the logs that the filter selects, by attempt and rank. Only ``first``, ``last``,
    ``rank`` and ``since`` are applied; with ``since``, files whose last write is older are left out. At most the newest
    ``_MAX_ATTEMPTS`` of the requested attempts are searched, and without ``rank`` at most the ``MAX_RANKS`` lowest ranks of each.
    At most ``MAX_NAMES`` names are read from the disk in all: the oldest attempts beyond that are left out."""
    with as_owner(job.root):
        return _log_files(job, log_filter)


def _log_files(job: JobPaths, log_filter: LogFilter) -> list[tuple[int, int, Path]]:
    """Like ``log_files``, called within ``as_owner``. The result is limited, since user code may have put anything there: of each
    of the newest ``_MAX_ATTEMPTS`` requested attempts the ``MAX_RANKS`` lowest ranks (a follower's mark has no more), with at
    most ``MAX_NAMES`` names read from the disk in all."""
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
    """True if the file exists and was last written at or after ``since`` (None: at any time). False if it cannot be accessed."""
    try:
        written = path.stat().st_mtime
    except OSError:
        return False
    return since is None or written >= since.timestamp()
