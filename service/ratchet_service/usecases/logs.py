"""Logs of ranks, read directly from their files. A line's id is ``<attempt>.<rank>.<byte offset after the line>``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ratchet_contract.api.views import LogLine, Page
from ratchet_contract.errors import Refused
from ratchet_contract.paths import JobPaths
from ratchet_service.isolation.file_access import as_owner
from ratchet_service.job_files.log_files import MAX_RANKS, LogFilter, log_files
from ratchet_service.job_files.rank_log import ReadLimit, lines_of, since_offset, tail_offset
from ratchet_service.usecases import pagination

MAX_PAGE_BYTES: Final = 16 << 20
"""Most bytes of logs that are read for one page: a rare text is searched in several requests."""
_ID: Final = re.compile(r"(\d{1,9})\.(\d{1,6})\.(\d{1,18})", re.ASCII)


@dataclass(frozen=True, order=True)
class Position:
    """A position in a job's logs, in order of attempt and rank: byte ``offset`` in the log of ``rank`` in ``attempt``."""

    attempt: int
    rank: int
    offset: int


def parse_position(text: str) -> Position:
    """Return the position after the line with the id ``text``. Raises ``Refused`` (``invalid-parameter``)."""
    match = _ID.fullmatch(text)
    if match is None:
        raise Refused(f"a log line's id is <attempt>.<rank>.<offset>, not {text!r}", code="invalid-parameter")
    return Position(int(match[1]), int(match[2]), int(match[3]))


def read_lines(
    job: JobPaths, log_filter: LogFilter, after: Position | None = None, limit: ReadLimit | None = None
) -> Iterator[LogLine]:
    """Yield the existing lines that the filter selects, and gaps, by attempt and rank. ``after``: only lines after this
    position. ``limit``: end early once it is reached."""
    for attempt, rank, path in log_files(job, log_filter):
        if after is not None and (attempt, rank) < (after.attempt, after.rank):
            continue
        begun = after is not None and (attempt, rank) == (after.attempt, after.rank)
        start = after.offset if begun and after is not None else first_offset(path, log_filter)
        yield from lines_of(path, attempt, rank, start, log_filter.grep, partial=True, limit=limit)
        if limit is not None and limit.stopped_at is not None:
            return


def first_offset(path: Path, log_filter: LogFilter) -> int:
    """Return the byte offset at which reading a log begins, by the filter's ``tail`` and ``since``; 0 without these two."""
    since = 0 if log_filter.since is None else since_offset(path, log_filter.since)
    return max(since, tail_offset(path, log_filter.tail))


def page(job: JobPaths, job_id: str, log_filter: LogFilter, limit: int, cursor: str | None) -> Page[LogLine]:
    """Return one page of the lines of ``read_lines``. If ``MAX_PAGE_BYTES`` were read before the page is full, it has fewer
    lines, perhaps none, and its cursor is where the next page begins. Raises ``Refused`` (``bad-cursor``)."""
    since = None if log_filter.since is None else log_filter.since.isoformat()
    digest = pagination.query_digest(
        of="logs",
        job=job_id,
        range=[log_filter.first, log_filter.last],
        rank=log_filter.rank,
        grep=log_filter.grep,
        since=since,
        tail=log_filter.tail,
    )
    after = pagination.decode(cursor, digest, (int, int, int))
    read_limit = ReadLimit(MAX_PAGE_BYTES)
    begin = None if after is None else Position(after[0], after[1], max(0, after[2]))
    lines = read_lines(job, log_filter, begin, read_limit)
    items = [line for _, line in zip(range(limit + 1), lines, strict=False)]
    following = None
    stopped_at = items[limit - 1].id if len(items) > limit else read_limit.stopped_at
    if stopped_at is not None:
        last = parse_position(stopped_at)
        following = pagination.encode(digest, [last.attempt, last.rank, last.offset])
    return Page[LogLine](items=items[:limit], next_cursor=following)


class Follower:
    """Reads lines as they are written, from all logs that the filter selects, also those of later attempts. Every line comes with
    a *mark*: another follower that gets the mark continues after the line. A line's id can also be used as a mark, but covers
    only the log of this line. Raise ``Refused`` for a malformed mark."""

    def __init__(self, job: JobPaths, log_filter: LogFilter, mark: str | None = None) -> None:
        """``mark``: continue after this mark; None: begin as the filter's ``tail`` and ``since`` request."""
        done = [] if mark is None else [parse_position(part) for part in mark.split(",")[:MAX_RANKS]]
        self._job = job
        self._offsets = {(p.attempt, p.rank): p.offset for p in done}
        self._resumed_at = max((p.attempt for p in done), default=None)
        first = min([log_filter.first, *(p.attempt for p in done)])
        self._filter = replace(log_filter, first=first, tail=log_filter.tail if mark is None else None)

    def poll(self, limit: int, *, is_final: bool = False) -> list[tuple[str, LogLine]]:
        """Return at most ``limit`` new lines, each with its mark. ``is_final``: nothing is written any more, so a last line
        without an end is returned, too."""
        out: list[tuple[str, LogLine]] = []
        files = log_files(self._job, self._filter)
        for attempt, rank, path in files:
            if (attempt, rank) not in self._offsets:
                self._offsets[attempt, rank] = self._start_offset(attempt, path)
        self._filter = replace(self._filter, tail=None)  # logs that appear later are read from their beginning
        for attempt, rank, path in files:
            for line in lines_of(path, attempt, rank, self._offsets[attempt, rank], None, partial=is_final):
                self._offsets[attempt, rank] = int(line.id.rpartition(".")[2])
                if self._filter.grep is None or self._filter.grep in line.text or line.left_out is not None:
                    out.append((self._mark_of(attempt), line))
                if len(out) >= limit:
                    return out
        return out

    def _start_offset(self, attempt: int, path: Path) -> int:
        """Return the byte offset at which reading the log of an attempt begins. For an attempt before that of the mark, this is
        the end of its log."""
        if self._resumed_at is not None and attempt < self._resumed_at:
            with as_owner(path):
                return path.stat().st_size  # lines are ordered by attempt: earlier attempts were read completely
        return first_offset(path, self._filter)

    def _mark_of(self, attempt: int) -> str:
        """Return the mark of the positions reached in the logs of ``attempt``."""
        return ",".join(f"{a}.{r}.{offset}" for (a, r), offset in sorted(self._offsets.items()) if a == attempt)
