"""One rank's log, read as lines: with ids, times from the index beside it, and one line where its middle was left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from ratchet_contract.api import LogLine
from ratchet_contract.log_times import LogTimes
from ratchet_service.file_owner import open_read
from ratchet_store.holes import data_after, hole_after

MAX_LINE: Final = 64 * 1024  # bytes; a longer line is cut into several
_BLOCK: Final = 64 * 1024
_MOST_TIMES: Final = 64 << 20  # bytes of an index; four records a second for twelve days
_SEARCHED: Final = 1 << 20  # bytes that are searched for a text at once


class Piece(NamedTuple):
    """Bytes from ``begin`` to ``end``; ``raw`` None: they were left out."""

    begin: int
    end: int
    raw: bytes | None


def lines_of(path: Path, attempt: int, rank: int, start: int, grep: str | None, *, partial: bool) -> Iterator[LogLine]:
    """Lines from byte ``start``; ``partial``: also a last one without its line end (a follower waits for the rest). With ``grep``
    only lines with that text, and those that tell of a gap."""
    try:
        with open_read(path) as handle:
            times: LogTimes | None = None
            for piece in _Log(handle, path).pieces(start, partial, grep):
                times = times or _times(path, os.fstat(handle.fileno()).st_size)
                yield _line(piece, attempt, rank, times)
    except (FileNotFoundError, PermissionError):
        return


def _line(piece: Piece, attempt: int, rank: int, times: LogTimes) -> LogLine:
    id_ = f"{attempt}.{rank}.{piece.end}"
    if piece.raw is None:
        size = piece.end - piece.begin
        text = f"[... {size} bytes ({size / (1 << 20):.1f} MiB) left out here: logs are bounded ...]"
        return LogLine(id=id_, attempt=attempt, rank=rank, text=text, left_out=size)
    text = piece.raw.removesuffix(b"\n").decode("utf-8", "replace")
    return LogLine(id=id_, attempt=attempt, rank=rank, text=text, at=times.at(piece.end))


def tail_offset(path: Path, lines: int | None) -> int:
    """Where the last ``lines`` lines begin; 0 for None, or when there are not more. Where they go back beyond a gap, that is
    where the gap begins."""
    if lines is None:
        return 0
    try:
        with open_read(path) as handle:
            return _Log(handle, path).tail(lines)
    except (FileNotFoundError, PermissionError):
        return 0


def since_offset(path: Path, since: datetime) -> int:
    """Where the first line begins that may have been written at ``since`` or later, by the index; 0 without one."""
    try:
        with open_read(path) as handle:
            size = os.fstat(handle.fileno()).st_size
            offset = _times(path, size).before(since)
            begin = max(0, offset - MAX_LINE)
            handle.seek(begin)
            return begin + handle.read(offset - begin).rfind(b"\n") + 1 if offset > 0 else 0
    except (FileNotFoundError, PermissionError):
        return 0


class _Log:
    """An open log. The file may grow, and its middle may be left out, while it is read."""

    def __init__(self, handle: BinaryIO, path: Path) -> None:
        self._handle = handle
        self._path = path

    def pieces(self, at: int, partial: bool, grep: str | None) -> Iterator[Piece]:
        # Asking for holes moves a descriptor's position, so that is done on one of its own.
        probe = self._again()
        try:
            while (data := data_after(probe, at)) is not None:
                if data > at:
                    resumed = self._first_line(data)
                    yield Piece(at, resumed, None)
                    at = resumed
                    continue
                read = False
                for piece in self._within(at, hole_after(probe, at), grep):
                    read = True
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
                            if partial and _has(piece.raw, grep):
                                yield piece
                            return
                    at = piece.end
                    if _has(piece.raw, grep):
                        yield piece
                if not read:
                    return
        finally:
            os.close(probe)

    def _again(self) -> int:
        with open_read(self._path) as file:
            return os.dup(file.fileno())

    def _first_line(self, data: int) -> int:
        """Behind a gap the first whole line; what is left of the one before it belongs to the gap."""
        self._handle.seek(data)
        end = self._handle.read(MAX_LINE).find(b"\n")
        return data if end < 0 else data + end + 1

    def _within(self, at: int, hole: int, grep: str | None) -> Iterator[Piece]:
        """Lines; with ``grep`` those of blocks that have the text, and a piece without bytes for each block that has not."""
        needle = None if grep is None or "\ufffd" in grep else grep.encode()
        while at < hole:
            stop = hole
            if needle:
                self._handle.seek(at)
                block = self._handle.read(min(_SEARCHED, hole - at))
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

    def tail(self, lines: int) -> int:
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
                block = block[:-1]  # the last line's own end begins no line
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                missing -= 1
                if missing == 0:
                    return begin + at + 1
            position = begin
        return gap

    def _last_gap(self) -> tuple[int, int]:
        """Begin and end of the last hole; zeros where there is none."""
        probe, at, found = self._again(), 0, (0, 0)
        try:
            while (data := data_after(probe, at)) is not None:
                if data > at:
                    found = at, data
                at = hole_after(probe, data)
            return found
        finally:
            os.close(probe)


def _times(path: Path, size: int) -> LogTimes:
    try:
        with open_read(path.with_suffix(".times")) as file:
            return LogTimes(file.read(_MOST_TIMES), size)
    except OSError:
        return LogTimes(b"", size)


def _has(raw: bytes, grep: str | None) -> bool:
    return grep is None or grep in raw.removesuffix(b"\n").decode("utf-8", "replace")
