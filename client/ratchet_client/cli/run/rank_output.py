"""What ranks print, copied from their logs to standard output as it comes: bytes as they are, attempt after attempt."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Final

from ratchet_client.cli import output
from ratchet_contract.paths import JobPaths

_PERIOD: Final = 0.1
_BLOCK: Final = 1 << 16


class RankOutput:
    """A context manager; at its end everything is out that ended ranks have printed. One rank's bytes are not changed; of several
    each line has ``ATTEMPT.RANK | `` in front, as ``ratchet logs`` has it."""

    def __init__(self, job: JobPaths, ranks: Collection[int] | None, shown: int, to: BinaryIO | None = None) -> None:
        """``ranks``: None: all of them. ``shown``: the last attempt whose output until now was shown before: it is left out."""
        self._job = job
        self._ranks = ranks
        self._to = to or sys.stdout.buffer
        self._prefixed = ranks is None or len(ranks) > 1
        self._offsets = {path: path.stat().st_size for attempt, _, path in self._logs() if attempt <= shown}
        self._first = shown
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
        """``text`` on a line of its own also where standard error shows what the ranks print, whose line may be open."""
        with self._lock:
            if self._open_line and _is_one_terminal(self._to, sys.stderr):
                self._open_line = False
                self._write(b"\n")
            output.note(text)

    def _run(self) -> None:
        while not self._over.wait(_PERIOD):
            self._poll(last=False)
        self._poll(last=True)

    def _logs(self) -> list[tuple[int, int, Path]]:
        """``(attempt, rank, file)`` of the logs that are there, in order."""
        found = []
        for path in (self._job.root / "attempts").glob("*/logs/rank-*.log"):
            attempt, rank = int(path.parts[-3]), int(path.stem.removeprefix("rank-"))
            if self._ranks is None or rank in self._ranks:
                found.append((attempt, rank, path))
        return sorted(found)

    def _poll(self, *, last: bool) -> None:
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

    def _copy(self, path: Path, over: bool) -> None:
        while data := self._read(path, _BLOCK):
            self._offsets[path] += len(data)
            self._open_line = not data.endswith(b"\n")
            self._write(data)
        if over and self._open_line:  # what the next attempt prints begins a line
            self._open_line = False
            self._write(b"\n")

    def _copy_lines(self, path: Path, prefix: bytes, over: bool) -> None:
        """Whole lines; one without its end when it is ``over``, or longer than a block."""
        while data := self._read(path, _BLOCK):
            end = data.rfind(b"\n") + 1
            if not end:
                if not over and len(data) < _BLOCK:
                    return
                end = len(data)
            self._offsets[path] += end
            self._write(b"".join(prefix + line + b"\n" for line in data[:end].removesuffix(b"\n").split(b"\n")))

    def _read(self, path: Path, size: int) -> bytes:
        """From where it was read to, past what was left out of a long log."""
        try:
            with path.open("rb") as file:
                at = os.lseek(file.fileno(), self._offsets.setdefault(path, 0), os.SEEK_DATA)
                self._offsets[path] = at
                return os.pread(file.fileno(), size, at)
        except OSError:  # not there (yet), or no more data
            return b""

    def _write(self, data: bytes) -> None:
        if self._read_by_nobody:
            return
        try:
            self._to.write(data)
            self._to.flush()
        except OSError as error:
            self._read_by_nobody = True
            why = "nobody reads it any more" if isinstance(error, BrokenPipeError) else error.strerror
            output.note(f"the ranks' output cannot be shown ({why}); training goes on, and the logs have it")


def _is_one_terminal(one: IO[Any], other: IO[Any]) -> bool:
    try:
        a, b = one.fileno(), other.fileno()
    except OSError:  # no file
        return False
    return os.isatty(a) and os.isatty(b) and os.path.samestat(os.fstat(a), os.fstat(b))


def last_lines(job: JobPaths, attempt: int, rank: int, count: int) -> list[str]:
    """The end of one rank's log."""
    try:
        with job.attempt(attempt).log(rank).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BLOCK))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []
