"""Finds processes of this machine by /proc (proc(5)), and kills them. Linux only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_EXEC_TIMEOUT_SECONDS: Final = 5.0  # seconds; tens of milliseconds were measured on a loaded machine
_FREEZE_SECONDS: Final = 5.0
_PF_EXITING: Final = 0x00000004  # include/linux/sched.h
_PF_KTHREAD: Final = 0x00200000


class Stat(NamedTuple):
    """Fields of ``/proc/PID/stat``. ``state``: one letter, such as R or Z. ``started``: in clock ticks since boot.
    ``environ_end``: address of the end of the environment; 0 within ``execve``, and if this process may not know it."""

    state: str
    parent: int
    flags: int
    started: int
    environ_end: int


def stat(pid: int) -> Stat | None:
    """Return what the kernel says about the process, also about a zombie; None if there is none."""
    try:
        # the command name, which ends at the last parenthesis, may have any bytes
        fields = _read(pid, "stat").rpartition(b")")[2].split()
    except OSError:
        return None
    return Stat(fields[0].decode(), int(fields[1]), int(fields[6]), int(fields[19]), int(fields[48]))


def pids() -> Iterator[int]:
    """Yield the pids of all processes that this process can see."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is none or it is a zombie. Together with the pid it
    identifies the process until the machine is restarted."""
    found = stat(pid)
    return None if found is None or found.state in "ZX" else found.started


def is_alive(pid: int, started: int) -> bool:
    """True if the process with this pid exists, is not a zombie and started at ``started``, in clock ticks since boot."""
    return start_time(pid) == started


def is_exiting(pid: int) -> bool:
    """True if the process does not exist, is a zombie, or is exiting."""
    found = stat(pid)
    return found is None or found.state in "ZX" or bool(found.flags & _PF_EXITING)


def runs_as(pid: int, uid: int) -> bool:
    """True if all user ids of the process (real, effective, saved, file system) are ``uid``. False if it does not exist."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return False
    numbers = next((line.split()[1:] for line in lines if line.startswith(b"Uid:")), [])
    return set(map(int, numbers)) == {uid}


def live_descendants(root: int) -> list[int]:
    """Return the sorted pids of all processes below ``root``, without zombies and ``root`` itself."""
    processes = {pid: found for pid in pids() if (found := stat(pid)) is not None}
    below = {root}
    while more := {pid for pid, found in processes.items() if found.parent in below and pid not in below}:
        below |= more
    return sorted(pid for pid in below - {root} if processes[pid].state not in "ZX")


def pids_with_variable(name: str, value: str) -> list[int]:
    """Return the sorted pids of other live processes that were started with ``name=value`` in their environment, if readable."""
    return sorted(pid for pid, found in processes_with_variable(name) if found == value)


def processes_with_variable(name: str) -> list[tuple[int, str]]:
    """Return (pid, value) for each other live process that was started with the variable ``name``, if its environment is
    readable."""
    out = []
    for pid in pids():
        if pid != os.getpid():
            with suppress(OSError):
                value = environment_variable(pid, name)
                if value is not None and start_time(pid) is not None:
                    out.append((pid, value))
    return out


def environment_variable(pid: int, name: str) -> str | None:
    """Return the variable ``name`` that the process was started with; None if it is not set. Blocks as ``read_environ``. Raises
    ``OSError`` if the environment cannot be read."""
    _, found, rest = (b"\0" + read_environ(pid)).partition(f"\0{name}=".encode())
    return os.fsdecode(rest.partition(b"\0")[0]) if found else None


def read_environ(pid: int) -> bytes:
    """Return the environment that the process was started with. Blocks for some seconds at most while the process is in
    ``execve``, during which its environment appears to be empty. Raises ``OSError`` if it cannot be read."""
    deadline = time.monotonic() + _EXEC_TIMEOUT_SECONDS
    settled = False
    while True:
        environ = _read(pid, "environ")
        if environ or settled or time.monotonic() > deadline:
            return environ
        settled = not _is_in_exec(pid)  # then read once more: execve may have ended since the last read
        if not settled:
            time.sleep(0.001)


def _read(pid: int, name: str) -> bytes:
    """Return the content of ``/proc/PID/name``. Raises ``OSError``."""
    # ``Path`` takes twice as long, for each of all processes
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.read()


def _is_in_exec(pid: int) -> bool:
    """True if the process is in ``execve``: the kernel has not set the end address of its environment yet."""
    found = stat(pid)
    return found is not None and found.state not in "ZX" and not found.flags & _PF_KTHREAD and found.environ_end == 0


def kill(pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Send the signal to the process; nothing if it does not exist. Raises ``PermissionError``."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def kill_until_gone(find_pids: Callable[[], list[int]], seconds: float) -> list[int]:
    """Call ``kill_all`` until ``find_pids`` finds none, for about ``seconds`` at most. Return the pids found by the last call."""
    end = time.monotonic() + seconds
    while (found := kill_all(find_pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def kill_all(find_pids: Callable[[], list[int]]) -> list[int]:
    """Send SIGKILL to the processes that ``find_pids`` finds. Call it again until it finds no new ones or time is up; the process
    groups of processes found by later calls are killed, too. Return all pids found, also of processes that this process may not
    kill, without waiting for their end."""
    found = find_pids()
    for pid in found:
        with suppress(PermissionError):
            kill(pid)
    known = set(found)
    stopped = list[int]()
    deadline = time.monotonic() + _FREEZE_SECONDS
    # A process that forks faster than processes are listed escapes every list. So later passes stop whole groups, each in one
    # step of the kernel: a stopped process forks no more, and still counts towards its user's limit.
    while found and (more := [pid for pid in find_pids() if pid not in known]):
        for pid in more:
            _signal_group(pid, signal.SIGSTOP)
        known.update(more)
        stopped += more
        if time.monotonic() > deadline:
            break
    for pid in stopped:
        _signal_group(pid, signal.SIGKILL)  # else those of the group that were not found would stay stopped
    return sorted(known)


def _signal_group(pid: int, signal_number: int) -> None:
    """Send the signal to the process and its process group, or to the process alone if it is in this process's session."""
    with suppress(ProcessLookupError, PermissionError):
        if os.getsid(pid) == os.getsid(0):
            os.kill(pid, signal_number)
        else:
            os.killpg(os.getpgid(pid), signal_number)
