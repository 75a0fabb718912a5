"""Reads one rank's log as lines with ids and times. A gap, where a part was deleted, becomes one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from ratchet_contract.api.views import LogLine
from ratchet_contract.protocol.log_index import LogTimes
from ratchet_service.isolation.file_access import open_read
from ratchet_store.filesystem.sparse import data_after, hole_after

MAX_LINE: Final = 64 * 1024  # bytes; a longer line is cut into several
_BLOCK: Final = 64 * 1024
_MAX_TIMES_BYTES: Final = 64 << 20  # bytes of an index; four records a second for twelve days
_SEARCH_BLOCK: Final = 1 << 20  # bytes that are searched for a text at a time


@dataclass
class ReadLimit:
    """Limits the bytes that are read for one answer. ``left``: bytes that may still be read. ``stopped_at``: the id form
    ``<attempt>.<rank>.<offset>`` of the position where none were left; None: that has not happened."""

    left: int
    stopped_at: str | None = None


class Piece(NamedTuple):
    """Bytes ``begin`` to ``end`` (excluded) of a log. ``raw``: a line, or a part of one; None: a gap, or skipped lines."""

    begin: int
    end: int
    raw: bytes | None


def lines_of(
    path: Path, attempt: int, rank: int, start: int, grep: str | None, *, partial: bool, limit: ReadLimit | None = None
) -> Iterator[LogLine]:
    """Yield the lines of the log ``path`` from byte ``start``; a gap is one line. ``grep``: only lines with this text, and gaps.
    ``partial``: also a last line without a line end. ``limit``: end early once it is reached."""
    try:
        with open_read(path) as handle:
            times: LogTimes | None = None
            for piece in _Log(handle, path).pieces(start, partial, grep, limit):
                if limit is not None and piece.begin == piece.end:
                    limit.stopped_at = f"{attempt}.{rank}.{piece.end}"
                    return
                times = times or _read_times(path, os.fstat(handle.fileno()).st_size)
                yield _line(piece, attempt, rank, times)
    except (FileNotFoundError, PermissionError):
        return


def _line(piece: Piece, attempt: int, rank: int, times: LogTimes) -> LogLine:
    """Return the line of a piece. Its id has the piece's end, from which a follower continues."""
    id_ = f"{attempt}.{rank}.{piece.end}"
    if piece.raw is None:
        size = piece.end - piece.begin
        text = f"[... {size} bytes ({size / (1 << 20):.1f} MiB) left out here: logs are bounded ...]"
        return LogLine(id=id_, attempt=attempt, rank=rank, text=text, left_out=size)
    text = piece.raw.removesuffix(b"\n").decode("utf-8", "replace")
    return LogLine(id=id_, attempt=attempt, rank=rank, text=text, at=times.time_of(piece.end))


def tail_offset(path: Path, lines: int | None) -> int:
    """Return the byte offset at which the last ``lines`` lines of the log begin. If there is a gap among them, return the offset
    of the last gap. Return 0 if ``lines`` is None, or if the log cannot be read."""
    if lines is None:
        return 0
    try:
        with open_read(path) as handle:
            return _Log(handle, path).tail_offset(lines)
    except (FileNotFoundError, PermissionError):
        return 0


def since_offset(path: Path, since: datetime) -> int:
    """Return the byte offset of the first line that may have been written at ``since`` or later; 0 if that is unknown."""
    try:
        with open_read(path) as handle:
            size = os.fstat(handle.fileno()).st_size
            offset = _read_times(path, size).size_before(since)
            begin = max(0, offset - MAX_LINE)
            handle.seek(begin)
            return begin + handle.read(offset - begin).rfind(b"\n") + 1 if offset > 0 else 0
    except (FileNotFoundError, PermissionError):
        return 0


class _Log:
    """An open log. While it is read, the file may grow, and its middle may be deleted."""

    def __init__(self, handle: BinaryIO, path: Path) -> None:
        self._handle = handle
        self._path = path

    def pieces(self, at: int, partial: bool, grep: str | None, limit: ReadLimit | None = None) -> Iterator[Piece]:
        """Yield the lines from byte ``at`` (``grep``: with this text), and gaps as pieces without bytes. ``partial``: also an
        unfinished last line. An empty piece is the last one: ``limit`` was reached."""
        # Searching for holes moves a descriptor's position, so a separate descriptor is used.
        probe = self._reopen()
        try:
            while (data := data_after(probe, at)) is not None:
                if data > at:
                    resumed = self._first_line_offset(data)
                    yield Piece(at, resumed, None)
                    at = resumed
                    continue
                read = False
                for piece in self._pieces_before_hole(at, hole_after(probe, at), grep):
                    read = True
                    if limit is not None:
                        if limit.left <= 0:
                            yield Piece(at, at, None)
                            return
                        limit.left -= piece.end - piece.begin
                    if piece.raw is None:
                        at = piece.end
                        continue
                    if b"\0" in piece.raw and hole_after(probe, piece.begin) < piece.end:
                        break  # it was left out while it was read
                    if not piece.raw.endswith(b"\n") and len(piece.raw) < MAX_LINE:
                        follows = data_after(probe, piece.end)
                        if follows == piece.end:
                            break  # more of it has been written meanwhile
                        if follows is None:
                            if partial and _matches(piece.raw, grep):
                                yield piece
                            return
                    at = piece.end
                    if _matches(piece.raw, grep):
                        yield piece
                if not read:
                    return
        finally:
            os.close(probe)

    def _reopen(self) -> int:
        """Return another descriptor of the file at the log's path; the caller closes it."""
        with open_read(self._path) as file:
            return os.dup(file.fileno())

    def _first_line_offset(self, data: int) -> int:
        """Return the offset after the first line end from offset ``data``, where a gap ends; ``data`` itself if there is none
        nearby."""
        self._handle.seek(data)
        end = self._handle.read(MAX_LINE).find(b"\n")
        return data if end < 0 else data + end + 1

    def _pieces_before_hole(self, at: int, hole: int, grep: str | None) -> Iterator[Piece]:
        """Yield the lines from byte ``at`` up to the offset ``hole``; blocks without the text ``grep`` as pieces
        without bytes."""
        needle = None if grep is None or "\ufffd" in grep else grep.encode()
        while at < hole:
            stop = hole
            if needle:
                self._handle.seek(at)
                block = self._handle.read(min(_SEARCH_BLOCK, hole - at))
                if not block:
                    return  # the job's code has cut the file
                whole = block.rfind(b"\n") + 1
                if whole and needle not in block and b"\0" not in block:
                    yield Piece(at, at + whole, None)
                    at += whole
                    continue
                stop = at + (whole or len(block))
            self._handle.seek(at)
            while at < stop:
                raw = self._handle.readline(min(MAX_LINE, hole - at))
                if not raw:
                    return
                yield Piece(at, at + len(raw), raw)
                at += len(raw)

    def tail_offset(self, lines: int) -> int:
        """Return the byte offset at which the last ``lines`` lines begin. If there is a gap among them, return the offset of the
        last gap. Return 0 if the log has fewer lines and no gap."""
        end = self._handle.seek(0, 2)
        if lines == 0 or end == 0:
            return end
        gap, floor = self._last_gap()
        position, missing = end, lines
        while position > floor:
            begin = max(floor, position - _BLOCK)
            self._handle.seek(begin)
            block = self._handle.read(position - begin)
            if position == end and block.endswith(b"\n"):
                block = block[:-1]  # no line begins after the last line end
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                missing -= 1
                if missing == 0:
                    return begin + at + 1
            position = begin
        return gap

    def _last_gap(self) -> tuple[int, int]:
        """Return begin and end of the last gap; (0, 0) if there is none."""
        probe, at, found = self._reopen(), 0, (0, 0)
        try:
            while (data := data_after(probe, at)) is not None:
                if data > at:
                    found = at, data
                at = hole_after(probe, data)
            return found
        finally:
            os.close(probe)


def _read_times(path: Path, size: int) -> LogTimes:
    """Return the times of the log's index; without times if it cannot be read. ``size``: that of the log."""
    try:
        with open_read(path.with_suffix(".times")) as file:
            return LogTimes(file.read(_MAX_TIMES_BYTES), size)
    except OSError:
        return LogTimes(b"", size)


def _matches(raw: bytes, grep: str | None) -> bool:
    """True if ``grep`` is None or the line contains it."""
    return grep is None or grep in raw.removesuffix(b"\n").decode("utf-8", "replace")
