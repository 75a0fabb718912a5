"""Logs of ranks, straight from their files: they outlive worker, node and server. The agent keeps an index of times beside each,
and bounds it.

A line's id is ``<attempt>.<rank>.<byte offset after the line>``. Lines come attempt by attempt, within it rank by rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from ratchet_contract.api import LogLine, Page
from ratchet_contract.errors import Refused
from ratchet_contract.paths import JobPaths
from ratchet_service import cursors
from ratchet_service.file_owner import MOST_NAMES, as_owner, names_in
from ratchet_service.log_lines import lines_of, since_offset, tail_offset

MAX_MARK: Final = 4096
_MOST_ATTEMPTS: Final = 10_000
_ID: Final = re.compile(r"(\d{1,9})\.(\d{1,6})\.(\d{1,18})", re.ASCII)
_LOG: Final = re.compile(r"rank-(\d{5,6})\.log", re.ASCII)
_ATTEMPT: Final = re.compile(r"\d{4,9}", re.ASCII)


@dataclass(frozen=True)
class LogFilter:
    """Attempts ``first`` to ``last`` (None: all later ones). ``grep`` is plain text, not a pattern. ``since``: lines written
    since then, and up to six seconds before (``log_times``); what has no time counts by when its file was written to last."""

    first: int = 1
    last: int | None = None
    rank: int | None = None
    grep: str | None = None
    since: datetime | None = None
    tail: int | None = None  # lines of each rank's log


@dataclass(frozen=True, order=True)
class Position:
    """Everything up to byte ``offset`` of one rank's log of one attempt, and all logs that come before it, is done."""

    attempt: int
    rank: int
    offset: int


def parse_position(text: str) -> Position:
    match = _ID.fullmatch(text)
    if match is None:
        raise Refused(f"a log line's id is <attempt>.<rank>.<offset>, not {text!r}", code="invalid-parameter")
    return Position(int(match[1]), int(match[2]), int(match[3]))


def log_files(job: JobPaths, wanted: LogFilter) -> list[tuple[int, int, Path]]:
    """``(attempt, rank, file)`` in order."""
    with as_owner(job.root):
        return _log_files(job, wanted)


def _log_files(job: JobPaths, wanted: LogFilter) -> list[tuple[int, int, Path]]:
    """Of what user code may have put there: of ``_MOST_ATTEMPTS``, the newest of those wanted, the ``MAX_MARK`` lowest ranks (a
    follower's mark has no more), and no more of the disk than ``MOST_NAMES`` in all."""
    out = []
    names = names_in(job.root / "attempts")
    left = MOST_NAMES - len(names)
    numbers = {int(name) for name in names if _ATTEMPT.fullmatch(name)}
    asked = sorted(n for n in numbers if wanted.first <= n and (wanted.last is None or n <= wanted.last))
    for attempt in asked[-_MOST_ATTEMPTS:]:
        paths = job.attempt(attempt)
        if wanted.rank is not None:
            ranks = [wanted.rank]
        else:
            names = names_in(paths.log(0).parent, left)
            left -= len(names)
            ranks = sorted({int(match[1]) for name in names if (match := _LOG.fullmatch(name))})[:MAX_MARK]
        found = ((attempt, rank, paths.log(rank)) for rank in ranks)
        sure = wanted.rank is None and wanted.since is None
        out += [one for one in found if sure or _written_since(one[2], wanted.since)]
    return out


def _written_since(path: Path, since: datetime | None) -> bool:
    """None: ever. False, too, for what is not there, or locked away."""
    try:
        written = path.stat().st_mtime
    except OSError:
        return False
    return since is None or written >= since.timestamp()


def read_lines(job: JobPaths, wanted: LogFilter, after: Position | None = None) -> Iterator[LogLine]:
    """What is there now, from ``after`` on."""
    for attempt, rank, path in log_files(job, wanted):
        if after is not None and (attempt, rank) < (after.attempt, after.rank):
            continue
        begun = after is not None and (attempt, rank) == (after.attempt, after.rank)
        start = after.offset if begun and after is not None else first_offset(path, wanted)
        yield from lines_of(path, attempt, rank, start, wanted.grep, partial=True)


def first_offset(path: Path, wanted: LogFilter) -> int:
    """Where one log is read from: the last of what ``tail`` and ``since`` ask for."""
    since = 0 if wanted.since is None else since_offset(path, wanted.since)
    return max(since, tail_offset(path, wanted.tail))


def page(job: JobPaths, job_id: str, wanted: LogFilter, limit: int, cursor: str | None) -> Page[LogLine]:
    """One page of ``read_lines``."""
    since = None if wanted.since is None else wanted.since.isoformat()
    digest = cursors.query_digest(
        of="logs", job=job_id, range=[wanted.first, wanted.last], rank=wanted.rank, grep=wanted.grep, since=since
    )
    after = cursors.decode(cursor, digest, (int, int, int))
    lines = read_lines(job, wanted, None if after is None else Position(after[0], after[1], max(0, after[2])))
    items = [line for _, line in zip(range(limit + 1), lines, strict=False)]
    following = None
    if len(items) > limit:
        last = parse_position(items[limit - 1].id)
        following = cursors.encode(digest, [last.attempt, last.rank, last.offset])
    return Page[LogLine](items=items[:limit], next_cursor=following)


class Follower:
    """Lines as they are written, of all logs that the filter takes, new attempts included. Not for several threads.

    Every line comes with a *mark*: the ids of how far each rank's log of that attempt is done, joined by commas. A follower
    that starts after a mark gets every later line once; a single line's id is a mark too, for that rank's log alone.
    """

    def __init__(self, job: JobPaths, wanted: LogFilter, mark: str | None = None) -> None:
        done = [] if mark is None else [parse_position(part) for part in mark.split(",")[:MAX_MARK]]
        self._job = job
        self._offsets = {(p.attempt, p.rank): p.offset for p in done}
        self._resumed_at = max((p.attempt for p in done), default=None)
        first = min([wanted.first, *(p.attempt for p in done)])
        self._wanted = replace(wanted, first=first, tail=wanted.tail if mark is None else None)

    def poll(self, limit: int, *, last: bool = False) -> list[tuple[str, LogLine]]:
        """At most ``limit`` new lines with their marks. ``last``: nothing is written any more, so a line without its end
        counts too."""
        out: list[tuple[str, LogLine]] = []
        files = log_files(self._job, self._wanted)
        for attempt, rank, path in files:
            if (attempt, rank) not in self._offsets:
                self._offsets[attempt, rank] = self._start(attempt, path)
        self._wanted = replace(self._wanted, tail=None)  # what comes from now on is new as a whole
        for attempt, rank, path in files:
            for line in lines_of(path, attempt, rank, self._offsets[attempt, rank], None, partial=last):
                self._offsets[attempt, rank] = int(line.id.rpartition(".")[2])
                if self._wanted.grep is None or self._wanted.grep in line.text or line.left_out is not None:
                    out.append((self._mark(attempt), line))
                if len(out) >= limit:
                    return out
        return out

    def _start(self, attempt: int, path: Path) -> int:
        if self._resumed_at is not None and attempt < self._resumed_at:
            with as_owner(path):
                return path.stat().st_size  # lines come attempt by attempt: the earlier ones were done
        return first_offset(path, self._wanted)

    def _mark(self, attempt: int) -> str:
        return ",".join(f"{a}.{r}.{offset}" for (a, r), offset in sorted(self._offsets.items()) if a == attempt)
