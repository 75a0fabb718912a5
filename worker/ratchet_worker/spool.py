"""A rank's messages on disk: JSON lines, one ``RankMessage`` each; the line number, from 1, is the sequence number.

The rank appends, the agent sends from the tail what the service has not acknowledged, and what an agent leaves behind the
service reads itself. Only complete lines count: a rank may die in the middle of a write.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from ratchet_contract.messages import Note, RankBatch, RankMessage
from ratchet_worker.files import now

_MEMORY_LIMIT: Final = 16 * 1024 * 1024
FIGURES: Final = frozenset({"metrics", "progress", "hook"})
"""Kinds of messages that come again and again: the first to be dropped where there is no room, the last to be hurried."""
_READ_SIZE: Final = 1024 * 1024
_LEAST_READ: Final = 64 * 1024
_MESSAGE: Final[TypeAdapter[RankMessage]] = TypeAdapter(RankMessage)


class Spool:
    """The rank's side: ``append`` never raises and never waits for anything but the page cache."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending, creating it. Raises ``OSError``: a rank that cannot report should not start."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._shed = 0
        self._failing = False

    def append(self, message: RankMessage) -> None:
        """One line, one ``write``. What the disk refuses is kept in memory and goes first, in order, next time."""
        try:
            line = message.model_dump_json().encode() + b"\n"
        except Exception as error:  # a value that JSON cannot carry must not end the training
            self._say(f"a message of kind {message.kind} cannot be written as JSON and is lost: {error}")
            return
        with self._lock:
            if self._fd < 0:
                return
            if self._waiting_bytes + len(line) > _MEMORY_LIMIT and message.kind in FIGURES:
                self._shed += 1
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._drain()

    def flush(self) -> bool:
        """Try again to write what waits in memory; True when nothing is left."""
        with self._lock:
            if self._fd >= 0:
                self._drain()
            return not self._waiting

    def close(self) -> None:
        """A last try, then close; says what is lost."""
        with self._lock:
            if self._fd < 0:
                return
            self._drain()
            lost = len(self._waiting) + self._shed
            if lost:
                self._say(f"{lost} messages are lost: they could not be written to {self._path}")
            os.close(self._fd)
            self._fd = -1

    def _drain(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            try:
                written = os.write(self._fd, line)
            except OSError as error:
                if not self._failing:
                    self._failing = True
                    self._say(f"{self._path} cannot be written ({error.strerror}); messages wait in memory")
                return
            self._waiting_bytes -= written
            if written < len(line):  # a nearly full disk takes a part; the rest of this line must follow it
                self._waiting[0] = line[written:]
            else:
                self._waiting.popleft()
        if self._failing:
            self._failing = False
            shed, self._shed = self._shed, 0
            self._say(f"{self._path} can be written again; {shed} metrics and progress messages were dropped")

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the log may lie on the same full disk
            print(f"ratchet: spool: {text}", file=sys.stderr, flush=True)


def read_lines(path: Path, offset: int, max_lines: int, max_bytes: int) -> list[bytes]:
    """Complete lines from byte ``offset`` on, without their newline, at most ``max_lines`` and together about ``max_bytes``.

    There is always at least one line if a complete one is there. ``[]`` when the file is missing.
    """
    lines: list[bytes] = []
    total = 0
    rest = b""
    size = min(_READ_SIZE, max(_LEAST_READ, max_bytes))
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
    """The agent's side: what follows the last acknowledged line of one rank."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._offset = 0
        self.acked = 0

    def batch(self, max_lines: int = 500, max_bytes: int = 256 * 1024) -> tuple[RankBatch | None, int]:
        """The next lines that are not acknowledged, or None, and their size in bytes."""
        lines = read_lines(self._path, self._offset, max_lines, max_bytes)
        if not lines:
            return None, 0
        messages = [self._parse(line, self.acked + 1 + i) for i, line in enumerate(lines)]
        return RankBatch(rank=self._rank, from_seq=self.acked + 1, messages=messages), sum(map(len, lines)) + len(lines)

    def has_more(self, size: int) -> bool:
        """Whether complete lines follow the next ``size`` bytes, as ``batch`` gave them."""
        return bool(read_lines(self._path, self._offset + size, 1, 1))

    def ack(self, seq: int) -> None:
        """The service has stored everything up to ``seq``; it may know more than was sent from here, or less."""
        if seq < self.acked:
            self._offset = self.acked = 0
        while self.acked < seq:
            lines = read_lines(self._path, self._offset, seq - self.acked, _READ_SIZE)
            if not lines:
                return
            self._offset += sum(map(len, lines)) + len(lines)
            self.acked += len(lines)

    def _parse(self, line: bytes, seq: int) -> RankMessage:
        try:
            return _MESSAGE.validate_json(line)
        except ValidationError as error:  # the line keeps its number, so the ones behind it are not lost
            first = error.errors(include_url=False, include_input=False)[0]["msg"]
            text = f"line {seq} of {self._path.name} is no message: {first}"
            return Note(rank=self._rank, at=now(), type="bad-message", message=text[:4000])
