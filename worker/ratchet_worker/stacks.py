"""Where the threads of hanging ranks are: each rank writes all its threads' Python stacks to its log, before it is killed.

``faulthandler`` does that in the signal's own C handler, so it needs no lock of Python's: also a rank whose thread keeps that
lock in native code tells where. The signal is a real-time one that neither torch nor what scripts commonly use takes; SIGUSR1
does the same for people, as long as a script does not take it for itself. A rank that is halted by SIGSTOP is let go on for it,
once the others are dead, and ended as soon as it has written: it is not to train on. One that does not answer has, in its place,
what the kernel says of it.
"""

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
_QUIET: Final = 0.1  # seconds without another byte: it has written all
_TICK: Final = 0.02


def answer() -> None:
    """In a rank, first of all: write the stacks when asked to."""
    for number in (STACKS_SIGNAL, signal.SIGUSR1):
        faulthandler.register(number, all_threads=True)


def ask(pid: int) -> None:
    """The signal waits while the process is halted, and is the first that happens when it goes on."""
    with suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
        os.kill(pid, signal.SIGCONT)


class Asked(Protocol):
    """What of ``starter.RankProcess`` is needed here."""

    @property
    def pid(self) -> int: ...

    def exit_code(self) -> int | None: ...

    def ask_for_stacks(self) -> None: ...


class Target(NamedTuple):
    process: Asked
    log: Path


def capture(ranks: Mapping[int, Target], why: str, patience: float, quiet: float = _QUIET) -> dict[int, str]:
    """Have all ``ranks`` write their stacks, under a heading that says ``why``. Returns when each has, or has ended, or after
    ``patience`` seconds; those that did not, with what is known of them, which their logs have then, too. Who has written nothing
    more for ``quiet`` seconds has written all."""
    sizes = {}
    for rank, target in ranks.items():
        _append(target.log, f"ratchet: {why}; rank {rank} writes the stacks of its threads:\n")
        sizes[rank] = _size(target.log)
        target.process.ask_for_stacks()
    deadline = time.monotonic() + patience
    waiting = {rank: (sizes[rank], time.monotonic()) for rank in ranks}
    while waiting and time.monotonic() < deadline:
        time.sleep(_TICK)
        now = time.monotonic()
        for rank, (size, since) in list(waiting.items()):
            target = ranks[rank]
            new = _size(target.log)
            if new != size:
                waiting[rank] = new, now
            elif target.process.exit_code() is not None or (
                now - since >= quiet and _has_written(target.log, sizes[rank])
            ):
                del waiting[rank]
    silent = {}
    for rank, target in ranks.items():
        if not _has_written(target.log, sizes[rank]):
            silent[rank] = _state(target.process)
            _append(
                target.log, f"ratchet: rank {rank} wrote no stacks: {silent[rank]}\n{_kernel_stack(target.process.pid)}"
            )
    return silent


def _state(process: Asked) -> str:
    if process.exit_code() is not None:
        return "it could not handle signals yet, and was ended by the request"
    facts = []
    with suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        facts += [line.replace("\t", " ") for line in status if line.startswith("State:")]
    with suppress(OSError):
        waits = Path(f"/proc/{process.pid}/wchan").read_text().strip()
        facts += [f"in the kernel's {waits}"] if waits not in ("", "0") else []
    return ", ".join(facts) or "nothing is known of it"


def _kernel_stack(pid: int) -> str:
    """Only root may read it."""
    try:
        return Path(f"/proc/{pid}/stack").read_text()
    except OSError:
        return ""


def _append(log: Path, text: str) -> None:
    with suppress(OSError), log.open("ab", buffering=0) as file:
        file.write(text.encode())


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _has_written(log: Path, offset: int) -> bool:
    try:
        with log.open("rb") as file:
            file.seek(offset)
            return _WRITTEN in file.read()
    except OSError:
        return False
