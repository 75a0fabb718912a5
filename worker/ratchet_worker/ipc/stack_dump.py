"""Stack dumps: on a signal, a rank writes the Python stacks of its threads to its log. The agent requests them before it kills
stuck ranks."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

STACKS_SIGNAL: Final = int(signal.SIGRTMIN) + 12
_WRITTEN: Final = b"most recent call first"
_QUIET: Final = 0.1  # seconds without another byte after which a dump is complete
_TICK: Final = 0.02


def install_handlers() -> None:
    """Install signal handlers that write the Python stacks of all threads (at most 100) to stderr, which is a rank's log."""
    for number in (STACKS_SIGNAL, signal.SIGUSR1):
        # Its C handler does not need the GIL, which a thread in native code may hold.
        faulthandler.register(number, all_threads=True)


def request_dump(pid: int) -> None:
    """Request, by a signal, that process ``pid`` writes its stacks to its log; do not wait. Continues a halted process, and ends
    one without ``install_handlers``."""
    with suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
        os.kill(pid, signal.SIGCONT)


class Asked(Protocol):
    """The part of ``rank_starter.RankProcess`` that is needed here. ``exit_code`` returns None while the process runs."""

    @property
    def pid(self) -> int: ...

    def exit_code(self) -> int | None: ...

    def request_stacks(self) -> None: ...


class Target(NamedTuple):
    """A rank process whose stacks are requested, and the log to which it writes them."""

    process: Asked
    log: Path


def capture_stacks(
    targets: Mapping[int, Target], why: str, timeout: float, quiet_seconds: float = _QUIET
) -> dict[int, str]:
    """Request that all ``targets``, by rank, write their stacks to their logs, under a heading with ``why``. Waits for about
    ``timeout`` seconds at most. Returns the state of each rank that wrote none."""
    sizes = {}
    for rank, target in targets.items():
        _append(target.log, f"ratchet: {why}; rank {rank} writes the stacks of its threads:\n")
        sizes[rank] = _size(target.log)
        target.process.request_stacks()
    deadline = time.monotonic() + timeout
    waiting = {rank: (sizes[rank], time.monotonic()) for rank in targets}
    while waiting and time.monotonic() < deadline:
        time.sleep(_TICK)
        now = time.monotonic()
        for rank, (size, since) in list(waiting.items()):
            target = targets[rank]
            new = _size(target.log)
            if new != size:
                waiting[rank] = new, now
            elif target.process.exit_code() is not None or (
                now - since >= quiet_seconds and _has_written(target.log, sizes[rank])
            ):
                del waiting[rank]
    silent = {}
    for rank, target in targets.items():
        if not _has_written(target.log, sizes[rank]):
            silent[rank] = _state(target.process)
            _append(
                target.log, f"ratchet: rank {rank} wrote no stacks: {silent[rank]}\n{_kernel_stack(target.process.pid)}"
            )
    return silent


def _state(process: Asked) -> str:
    """Return a description of a process that wrote no stacks: that it has ended, or its state in the kernel, if
    known."""
    if (code := process.exit_code()) == -STACKS_SIGNAL:
        return "it could not handle signals yet, and the request's signal ended it"
    if code is not None:
        return f"it ended meanwhile (exit code {code})"
    facts = []
    with suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text(errors="replace").splitlines()
        facts += [line.replace("\t", " ") for line in status if line.startswith("State:")]
    with suppress(OSError):
        waits = Path(f"/proc/{process.pid}/wchan").read_text().strip()
        facts += [f"in the kernel's {waits}"] if waits not in ("", "0") else []
    return ", ".join(facts) or "its state is unknown"


def _kernel_stack(pid: int) -> str:
    """Return the kernel stack of ``pid``; empty if it cannot be read, as without root privileges."""
    try:
        return Path(f"/proc/{pid}/stack").read_text()
    except OSError:
        return ""


def _append(log: Path, text: str) -> None:
    with suppress(OSError), log.open("ab", buffering=0) as file:
        file.write(text.encode())


def _size(log: Path) -> int:
    """Return the size of the log in bytes; 0 if it cannot be read."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _has_written(log: Path, offset: int) -> bool:
    """True if the heading of a stack dump is in the log from byte ``offset`` on; False if the log cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            return _WRITTEN in file.read()
    except OSError:
        return False
