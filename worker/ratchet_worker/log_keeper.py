"""The ranks' logs, as the agent looks after them: bounded, and with an index of times.

Ranks write to their files directly, so that nothing between them can block a rank. A log that takes more disk than
``LaunchFile.log_bytes`` loses its middle: the blocks are given back, sizes and offsets stay, and so do ids of lines, positions of
followers and the ranks' own descriptors. The first MiB stays, since a job's beginning tells how it was configured, and the end.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratchet_contract.log_times import RECORD, SECONDS, SPACING
from ratchet_contract.messages import LaunchFile, Note, node_rank
from ratchet_contract.paths import AttemptPaths
from ratchet_store import holes
from ratchet_worker.files import now, say
from ratchet_worker.spool import Spool

HEAD: Final = 1 << 20
"""Bytes at the beginning of a log that stay, or a quarter of the bound where that is less."""
_LOOK: Final = 1.0  # seconds


@dataclass
class _Log:
    rank: int
    path: Path
    times: Path
    left_out: int = 0  # bytes of its middle
    recorded: int = 0
    recorded_at: float = 0.0  # Unix seconds


class LogKeeper:
    """``start``, and ``finish`` once the ranks have ended. A thread of its own: a disk that hangs must not hold up the watch."""

    def __init__(self, launch: LaunchFile, paths: AttemptPaths) -> None:
        self._logs = [_Log(rank, paths.log(rank), paths.log_times(rank)) for rank in launch.ranks]
        self._most, self._node = launch.log_bytes, launch.node
        self._spool = paths.node_spool(launch.node)
        self._telling: Spool | None = None
        self._told: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def spools(self) -> dict[int, Path]:
        """What there is to be said of the node, for the uplink."""
        return {node_rank(self._node): self._spool}

    def start(self) -> None:
        self._thread.start()

    def finish(self, deadline: float = 5.0) -> None:
        """A last look, for at most ``deadline`` seconds."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(deadline)

    def _run(self) -> None:
        while True:
            last = self._over.wait(_LOOK)
            self.look(time.time(), last=last)
            if last:
                if self._telling is not None:
                    self._telling.close()
                return

    def look(self, at: float, *, last: bool = False) -> None:
        """Record sizes, and bound what is too large. ``at``: Unix seconds. Raises nothing: what fails is tried again."""
        for log in self._logs:
            try:
                found = log.path.stat()
                self._record(log, found.st_size, at, last)
                # Not by blocks alone: XFS allots many to a file that grows, well beyond its end.
                if min(found.st_blocks * 512, found.st_size - log.left_out) > self._most:
                    self._bound(log, found.st_size)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._tell("log-not-kept", f"{log.path} cannot be looked after: {error.strerror}")

    def _record(self, log: _Log, size: int, at: float, last: bool) -> None:
        if size <= log.recorded:
            return
        if size - log.recorded < SPACING and at - log.recorded_at < SECONDS and not last:
            return
        at = max(at, log.recorded_at)  # a clock that is set back must not turn the index around
        fd = os.open(log.times, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if os.write(fd, RECORD.pack(size, int(at * 1e6))) != RECORD.size:
                os.ftruncate(fd, os.fstat(fd).st_size // RECORD.size * RECORD.size)
                return
        finally:
            os.close(fd)
        log.recorded, log.recorded_at = size, at

    def _bound(self, log: _Log, size: int) -> None:
        """A quarter more than needed goes, so that this is seldom."""
        if "logs-unbounded" in self._told:
            return
        if "log-shortened" not in self._told and (why := holes.why_not(log.path.parent)) is not None:
            text = f"the file system of {log.path.parent} cannot free the middle of a file: {why}"
            self._tell("logs-unbounded", f"{text}. Logs of this node grow without bound")
            return
        head = min(HEAD, self._most // 4)
        end = size - (self._most - head) * 3 // 4
        holes.punch(log.path, head, end)
        log.left_out = end - head
        if "log-shortened" not in self._told:
            text = f"the log of rank {log.rank} has grown beyond {self._most >> 20} MiB: of logs of this node the"
            self._tell("log-shortened", f"{text} first {head >> 10} KiB and the end are kept")

    def _tell(self, kind: str, message: str) -> None:
        """Once of each kind, to the agent's log and the job's history."""
        if kind in self._told:
            return
        self._told.add(kind)
        say(f"{kind}: {message}")
        try:
            self._telling = self._telling or Spool(self._spool)
        except OSError:
            return
        self._telling.append(Note(rank=node_rank(self._node), at=now(), type=kind, message=message))
