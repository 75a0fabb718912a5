"""Copies the ranks' output from their logs to standard output as it arrives, attempt after attempt."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Final

from ratchet_client.cli.shared import output
from ratchet_contract.paths import JobPaths

_PERIOD: Final = 0.1
_BLOCK: Final = 1 << 16


class RankOutput:
    """A context manager that copies the ranks' output from their logs to standard output, or to ``to``. A thread copies new
    output as it arrives; on exit it copies what remains. The prefix ``ATTEMPT.RANK | `` is put before each line, unless one rank
    is selected."""

    def __init__(
        self, job: JobPaths, ranks: Collection[int] | None, last_displayed_attempt: int, to: BinaryIO | None = None
    ) -> None:
        """``ranks``: whose output is copied; None: all. ``last_displayed_attempt``: output that this and earlier attempts have
        written by now is skipped."""
        self._job = job
        self._ranks = ranks
        self._to = to or sys.stdout.buffer
        self._prefixed = ranks is None or len(ranks) > 1
        self._offsets = {
            path: path.stat().st_size for attempt, _, path in self._logs() if attempt <= last_displayed_attempt
        }
        self._first = last_displayed_attempt
        self._open_line = False
        self._lock = threading.Lock()
        self._read_by_nobody = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-output", daemon=True)

    def __enter__(self) -> RankOutput:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def note(self, text: str) -> None:
        """Print ``text`` on standard error; on a terminal, on a line of its own."""
        with self._lock:
            if self._open_line and _is_one_terminal(self._to, sys.stderr):
                self._open_line = False
                self._write(b"\n")
            output.note(text)

    def _run(self) -> None:
        """Copy new output until the context is left, then all that remains."""
        while not self._over.wait(_PERIOD):
            self._poll(last=False)
        self._poll(last=True)

    def _logs(self) -> list[tuple[int, int, Path]]:
        """Return ``(attempt, rank, file)`` of the existing logs of the selected ranks, sorted by attempt and rank."""
        found = []
        for path in (self._job.root / "attempts").glob("*/logs/rank-*.log"):
            attempt, rank = int(path.parts[-3]), int(path.stem.removeprefix("rank-"))
            if self._ranks is None or rank in self._ranks:
                found.append((attempt, rank, path))
        return sorted(found)

    def _poll(self, *, last: bool) -> None:
        """Copy the new output of the newest attempts. ``last``: no more output follows, so incomplete lines are copied too."""
        logs = [one for one in self._logs() if one[0] >= self._first]
        newest = max((attempt for attempt, _, _ in logs), default=0)
        for attempt, rank, path in logs:
            over = last or attempt < newest
            with self._lock:
                if self._prefixed:
                    self._copy_lines(path, f"{attempt}.{rank} | ".encode(), over)
                else:
                    self._copy(path, over)
        self._first = max(self._first, newest)

    def _copy(self, path: Path, is_over: bool) -> None:
        """Copy the new bytes of a log. ``is_over``: nothing more of this attempt is copied, so an incomplete last line is
        ended."""
        while data := self._read(path, _BLOCK):
            self._offsets[path] += len(data)
            self._open_line = not data.endswith(b"\n")
            self._write(data)
        if is_over and self._open_line:  # the next attempt's output starts on a new line
            self._open_line = False
            self._write(b"\n")

    def _copy_lines(self, path: Path, prefix: bytes, is_over: bool) -> None:
        """Copy the new lines of a log, each with ``prefix``. ``is_over``: nothing more of this attempt is copied later, so an
        incomplete last line is copied too."""
        while data := self._read(path, _BLOCK):
            end = data.rfind(b"\n") + 1
            if not end:
                # A line that fills a block is cut, and each part gets the prefix.
                if not is_over and len(data) < _BLOCK:
                    return
                end = len(data)
            self._offsets[path] += end
            self._write(b"".join(prefix + line + b"\n" for line in data[:end].removesuffix(b"\n").split(b"\n")))

    def _read(self, path: Path, size: int) -> bytes:
        """Return at most ``size`` bytes of the log that were not yet copied; b"" if there are none. A hole in the file is
        skipped."""
        try:
            with path.open("rb") as file:
                # The part that was omitted from a long log is a hole.
                at = os.lseek(file.fileno(), self._offsets.setdefault(path, 0), os.SEEK_DATA)
                self._offsets[path] = at
                return os.pread(file.fileno(), size, at)
        except OSError:  # no such file (yet), or no more data
            return b""

    def _write(self, data: bytes) -> None:
        """Write ``data`` and flush. If that fails, print a note once and drop all later output; training continues."""
        if self._read_by_nobody:
            return
        try:
            self._to.write(data)
            self._to.flush()
        except OSError as error:
            self._read_by_nobody = True
            why = "its reader has closed it" if isinstance(error, BrokenPipeError) else error.strerror
            output.note(f"the ranks' output cannot be shown ({why}); training continues, and the logs contain it")


def _is_one_terminal(one: IO[Any], other: IO[Any]) -> bool:
    """Return True if both streams are the same terminal."""
    try:
        a, b = one.fileno(), other.fileno()
    except OSError:  # no file
        return False
    return os.isatty(a) and os.isatty(b) and os.path.samestat(os.fstat(a), os.fstat(b))


def last_lines(job: JobPaths, attempt: int, rank: int, count: int) -> list[str]:
    """Return the last ``count`` lines, at most 64 KiB, of one rank's log; an empty list if there is no log."""
    try:
        with job.attempt(attempt).log(rank).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BLOCK))
            lines = file.read().splitlines()[-count:]  # of bytes: those of text end at U+2028 and others, too
            return [line.decode("utf-8", "replace") for line in lines]
    except OSError:
        return []
