"""Child processes: their end with the parent, the processes that ranks leave running, and the out-of-memory killer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ratchet_contract.processes import procfs

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PROC: Final = Path("/proc")


def _prctl(option: int, value: int) -> None:
    """Call prctl(2) for this process. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def die_with_parent(expected_ppid: int) -> None:
    """Have the kernel kill this process when the *thread* of the parent ``expected_ppid`` that forked it ends; at once if the
    parent has ended. Raises ``OSError``."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected_ppid:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Make this process the new parent of descendants whose own parent ends. Raises ``OSError``."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_stragglers(variable: str, value: str, *, timeout: float = 5.0) -> list[int]:
    """Kill every other process started with ``variable=value`` in its environment, and every descendant of this process. Reaps
    all dead children. Blocks for about ``timeout`` seconds at most; returns the pids that were alive at its last poll."""
    left = procfs.kill_until_gone(
        lambda: [*procfs.pids_with_variable(variable, value), *procfs.live_descendants(os.getpid())], timeout
    )
    with contextlib.suppress(ChildProcessError):  # only now: until then no pid of a child is reused
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    return left


def reap_orphans(owned_pids: Callable[[], set[int]]) -> None:
    """Reap all dead children of this process, except those whose pids ``owned_pids`` returns, which other code reaps."""
    own = os.getpid()
    dead = {p for p in procfs.pids() if (found := procfs.stat(p)) and found.state == "Z" and found.parent == own}
    # Called after the dead children are listed, since one of them may have got its owner just before.
    for pid in dead - owned_pids():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


class OomWatch:
    """Detects that the kernel's out-of-memory killer has killed a process, in this process's cgroup or else on the machine."""

    def __init__(self) -> None:
        self._source = _oom_source()
        self._last = self._count()
        self._grew_at: float | None = None

    def killed_recently(self, seconds: float = 10.0) -> bool:
        """True if a call less than ``seconds`` ago, or this one, has found that the kernel killed a process for lack of memory.
        Each call covers the time since the previous call; the first one, since the creation."""
        count, now = self._count(), time.monotonic()
        if count is not None:
            if self._last is not None and count > self._last:
                self._grew_at = now
            self._last = count
        return self._grew_at is not None and now - self._grew_at < seconds

    def _count(self) -> int | None:
        """Return the current count; None if it cannot be read."""
        try:
            for line in self._source.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        except (OSError, ValueError):
            pass
        return None


def _oom_source() -> Path:
    """Return the file that has the ``oom_kill`` count: of this process's cgroup if it exists, else ``/proc/vmstat``."""
    mount = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                candidate = mount / path.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                candidate = mount / "memory" / path.lstrip("/") / "memory.oom_control"
            else:
                continue
            if candidate.is_file():
                return candidate
    return _PROC / "vmstat"
