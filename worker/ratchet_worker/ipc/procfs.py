"""Linux processes: parent-death signal, facts from /proc, and killing the processes that a rank left running."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PF_EXITING: Final = 0x4
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


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/<pid>/stat`` from number 3 (state) on; None if that cannot be read, as without such a
    process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None


def start_time(pid: int) -> int:
    """Return when the process started, in clock ticks since boot. Raises ``ProcessLookupError`` if there is no such process."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(pid)
    return int(fields[19])


def state(pid: int) -> str | None:
    """Return the state of a process as one letter of proc(5), such as R or Z; None without such a process."""
    fields = _stat(pid)
    return fields[0] if fields else None


def is_exiting(pid: int) -> bool:
    """True if the process does not exist, is a zombie, or is exiting."""
    fields = _stat(pid)
    return fields is None or fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


def pids() -> Iterator[int]:
    """Yield the pids of all processes that this process can see."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def descendants(root: int) -> set[int]:
    """Return the pids of all processes below ``root``, zombies included, without ``root`` itself."""
    parents = {pid: int(fields[1]) for pid in pids() if (fields := _stat(pid)) is not None}
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found - {root}


def has_variable(pid: int, assignment: bytes) -> bool:
    """True if ``assignment`` (``NAME=value``) is in the environment with which ``pid`` was started; False if that cannot be
    read."""
    try:
        return assignment in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def kill_group(pgid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send the signal ``number`` to all processes of a process group. Ignores a missing or foreign group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def kill_stragglers(variable: str, value: str, *, timeout: float = 5.0) -> list[int]:
    """Kill every other process started with ``variable=value`` in its environment, and every descendant of this process. Reaps
    all dead children. Blocks for about ``timeout`` seconds at most; returns the pids that were alive at its last poll."""
    assignment = os.fsencode(f"{variable}={value}")
    own = os.getpid()
    end = time.monotonic() + timeout
    while True:
        marked = {pid for pid in pids() if pid != own and has_variable(pid, assignment)} | descendants(own)
        alive = {pid for pid in marked if state(pid) not in ("Z", "X", None)}
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap_orphans(set)
        if not alive or time.monotonic() > end:
            return sorted(alive)
        time.sleep(0.01)


def reap_orphans(owned_pids: Callable[[], set[int]]) -> None:
    """Reap all dead children of this process, except those whose pids ``owned_pids`` returns, which other code reaps."""
    own = os.getpid()
    dead = {pid for pid in pids() if (fields := _stat(pid)) and fields[0] == "Z" and int(fields[1]) == own}
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


def remove_tree(path: Path) -> None:
    """Delete a directory with everything in it. What cannot be deleted is skipped without an error."""
    shutil.rmtree(path, ignore_errors=True)
