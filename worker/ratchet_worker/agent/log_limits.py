"""Bounds the size of the ranks' logs and keeps an index of times. A log that is too large loses its middle by a punched hole, so
that offsets stay valid."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import NoteType
from ratchet_contract.protocol.log_index import RECORD, SPACING_BYTES, SPACING_SECONDS
from ratchet_contract.protocol.messages import LaunchFile, Note, node_rank
from ratchet_store.filesystem import sparse
from ratchet_worker.ipc.log_lines import log_message, now
from ratchet_worker.ipc.report_spool import Spool

HEAD: Final = 1 << 20
"""Bytes kept at the beginning of a log, or a quarter of the bound if that is less."""
_POLL_SECONDS: Final = 1.0  # seconds


@dataclass
class _Log:
    """One rank's log file, and how far it was processed. ``times``: the file with the index of times."""

    rank: int
    path: Path
    times: Path
    removed_bytes: int = 0  # bytes removed from its middle
    recorded_size: int = 0
    recorded_at: float = 0.0  # Unix seconds


class LogKeeper:
    """Bounds the logs of this node's ranks in a thread of its own, because a hung disk must not block the supervisor."""

    def __init__(self, launch: LaunchFile, paths: AttemptPaths) -> None:
        self._logs = [_Log(rank, paths.log(rank), paths.log_times(rank)) for rank in launch.ranks]
        self._max_bytes, self._node = launch.log_bytes, launch.node
        self._spool_path = paths.node_spool(launch.node)
        self._open_spool: Spool | None = None
        self._reported_kinds: set[NoteType] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def spools(self) -> dict[int, Path]:
        """Return the spool of this node's own messages, by the rank number that stands for the node."""
        return {node_rank(self._node): self._spool_path}

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout: float = 5.0) -> None:
        """Make a last pass over the logs and end the thread; waits at most ``timeout`` seconds."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        """The thread's loop: poll the logs every second, and once more after ``finish``."""
        while True:
            last = self._stopping.wait(_POLL_SECONDS)
            self.poll(time.time(), last=last)
            if last:
                if self._open_spool is not None:
                    self._open_spool.close()
                return

    def poll(self, at: float, *, last: bool = False) -> None:
        """Record the logs' sizes and shorten those that are too large. ``at``: Unix seconds; ``last``: record every growth."""
        for log in self._logs:
            try:
                found = log.path.stat()
                self._record(log, found.st_size, at, last)
                # Blocks alone are not enough: XFS preallocates many beyond the end of a growing file.
                if min(found.st_blocks * 512, found.st_size - log.removed_bytes) > self._max_bytes:
                    self._shorten(log, found.st_size)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._report_once(NoteType.LOG_NOT_KEPT, f"the size of {log.path} cannot be limited: {error.strerror}")

    def _record(self, log: _Log, size: int, at: float, last: bool) -> None:
        """Append the log's ``size`` and the time ``at`` to its index, if a new record is due."""
        if size <= log.recorded_size:
            return
        if size - log.recorded_size < SPACING_BYTES and at - log.recorded_at < SPACING_SECONDS and not last:
            return
        at = max(at, log.recorded_at)  # the index must stay in order if the clock is set back
        fd = os.open(log.times, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if os.write(fd, RECORD.pack(size, int(at * 1e6))) != RECORD.size:
                os.ftruncate(fd, os.fstat(fd).st_size // RECORD.size * RECORD.size)
                return
        finally:
            os.close(fd)
        log.recorded_size, log.recorded_at = size, at

    def _shorten(self, log: _Log, size: int) -> None:
        """Remove the middle of the log, down to about three quarters of the bound, if the file system can punch holes."""
        if NoteType.LOGS_UNBOUNDED in self._reported_kinds:
            return
        if (
            NoteType.LOG_SHORTENED not in self._reported_kinds
            and (why := sparse.unsupported_reason(log.path.parent)) is not None
        ):
            text = f"the file system of {log.path.parent} cannot free the middle of a file: {why}"
            self._report_once(NoteType.LOGS_UNBOUNDED, f"{text}. Logs of this node grow without bound")
            return
        head = min(HEAD, self._max_bytes // 4)
        end = size - (self._max_bytes - head) * 3 // 4
        sparse.punch_hole(log.path, head, end)
        log.removed_bytes = end - head
        if NoteType.LOG_SHORTENED not in self._reported_kinds:
            text = f"the log of rank {log.rank} has grown beyond {self._max_bytes >> 20} MiB: of logs of this node, only the"
            self._report_once(NoteType.LOG_SHORTENED, f"{text} first {head >> 10} KiB and the end are retained")

    def _report_once(self, kind: NoteType, message: str) -> None:
        """Write a message to the agent's log and the job's history, once per kind."""
        if kind in self._reported_kinds:
            return
        self._reported_kinds.add(kind)
        log_message(f"{kind}: {message}")
        try:
            self._open_spool = self._open_spool or Spool(self._spool_path)
        except OSError:
            return
        self._open_spool.append(Note(rank=node_rank(self._node), at=now(), type=kind, message=message))
