"""Messages of a rank, or of an agent itself, on disk: JSON lines, one ``RankMessage`` each. The line number, from 1, is the
sequence number."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from ratchet_contract.phases import NoteType
from ratchet_contract.protocol.messages import Note, RankBatch, RankMessage
from ratchet_worker.ipc.log_lines import now, print_to_log

_MEMORY_LIMIT: Final = 16 * 1024 * 1024
LOW_PRIORITY_KINDS: Final = frozenset({"metrics", "progress", "hook"})
"""Kinds of frequent messages: they are dropped first when the buffer is full, and may be sent with a delay."""
_READ_SIZE: Final = 1024 * 1024
_MIN_READ_SIZE: Final = 64 * 1024
_MESSAGE: Final[TypeAdapter[RankMessage]] = TypeAdapter(RankMessage)


class Spool:
    """Writes the messages of a rank, or those of an agent itself, to a spool. ``append`` never raises. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending, and create it if it is missing. Raises ``OSError``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._dropped = 0
        self._failing = False

    def append(self, message: RankMessage) -> None:
        """Append ``message`` as one line; never raises. A line that the disk does not take waits in memory. While 16 MiB wait,
        ``LOW_PRIORITY_KINDS`` are dropped. No effect after ``close``."""
        try:
            line = message.model_dump_json().encode() + b"\n"
        except Exception as error:  # a value that JSON cannot carry must not end the training
            self._log(f"a message of kind {message.kind} cannot be written as JSON and is lost: {error}")
            return
        with self._lock:
            if self._fd < 0:
                return
            if self._pending_bytes + len(line) > _MEMORY_LIMIT and message.kind in LOW_PRIORITY_KINDS:
                self._dropped += 1
                return
            self._pending.append(line)
            self._pending_bytes += len(line)
            self._drain()

    def flush(self) -> bool:
        """Try again to write the lines that wait in memory. Return True if none is left."""
        with self._lock:
            if self._fd >= 0:
                self._drain()
            return not self._pending

    def close(self) -> None:
        """Try once more to write the waiting lines, and close the file. Messages that cannot be written are lost."""
        with self._lock:
            if self._fd < 0:
                return
            self._drain()
            lost = len(self._pending) + self._dropped
            if lost:
                self._log(f"{lost} messages are lost: they could not be written to {self._path}")
            os.close(self._fd)
            self._fd = -1

    def _drain(self) -> None:
        """Write the waiting lines in order until none is left or a write fails."""
        while self._pending:
            line = self._pending[0]
            try:
                written = os.write(self._fd, line)
            except OSError as error:
                if not self._failing:
                    self._failing = True
                    self._log(f"{self._path} cannot be written ({error.strerror}); messages wait in memory")
                return
            self._pending_bytes -= written
            if written < len(line):  # partial write on a nearly full disk: the rest of this line must follow
                self._pending[0] = line[written:]
            else:
                self._pending.popleft()
        if self._failing:
            self._failing = False
            shed, self._dropped = self._dropped, 0
            self._log(f"{self._path} can be written again; {shed} metrics and progress messages were dropped")

    def _log(self, text: str) -> None:
        """Write a line to ``sys.stderr``; a failure is ignored."""
        print_to_log(f"ratchet: spool: {text}")  # the log may be on the same full disk


def read_lines(path: Path, offset: int, max_lines: int, max_bytes: int) -> list[bytes]:
    """Return complete lines from byte ``offset`` on: at most ``max_lines`` and about ``max_bytes``, but at least one if possible.
    Returns none if the file is missing. Raises ``OSError``."""
    lines: list[bytes] = []
    total = 0
    rest = b""
    size = min(_READ_SIZE, max(_MIN_READ_SIZE, max_bytes))
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return lines
    with file:
        file.seek(offset)
        while chunk := file.read(size):
            *complete, rest = (rest + chunk).split(b"\n")
            for line in complete:
                total += len(line) + 1
                if lines and (total > max_bytes or len(lines) >= max_lines):
                    return lines
                lines.append(line)
    return lines


class SpoolReader:
    """The agent's side: reads the lines of one spool after line ``acked``, the last that the service has acknowledged."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._offset = 0
        self.acked = 0

    def batch(self, max_lines: int = 500, max_bytes: int = 256 * 1024) -> tuple[RankBatch | None, int]:
        """Return the next unacknowledged lines as a batch, and their size in bytes; ``(None, 0)`` if there are none. Raises
        ``OSError``."""
        lines = read_lines(self._path, self._offset, max_lines, max_bytes)
        if not lines:
            return None, 0
        messages = [self._parse(line, self.acked + 1 + i) for i, line in enumerate(lines)]
        return RankBatch(rank=self._rank, from_seq=self.acked + 1, messages=messages), sum(map(len, lines)) + len(lines)

    def has_more(self, size: int) -> bool:
        """True if there is a complete line after the first ``size`` bytes of unacknowledged lines."""
        return bool(read_lines(self._path, self._offset + size, 1, 1))

    def ack(self, seq: int) -> None:
        """Record that the service has stored all lines up to number ``seq``; ``batch`` then continues with the next line. A
        smaller ``seq`` than before makes it go back. Raises ``OSError``."""
        if seq < self.acked:
            self._offset = self.acked = 0
        while self.acked < seq:
            lines = read_lines(self._path, self._offset, seq - self.acked, _READ_SIZE)
            if not lines:
                return
            self._offset += sum(map(len, lines)) + len(lines)
            self.acked += len(lines)

    def _parse(self, line: bytes, seq: int) -> RankMessage:
        """Return the message in ``line``; for an invalid line, a note with the line's number ``seq``."""
        try:
            return _MESSAGE.validate_json(line)
        except ValidationError as error:  # a note takes this line's number, so the following lines are not lost
            first = error.errors(include_url=False, include_input=False)[0]["msg"]
            text = f"line {seq} of {self._path.name} is no message: {first}"
            return Note(rank=self._rank, at=now(), type=NoteType.BAD_MESSAGE, message=text[:4000])
