"""Finds processes by /proc (which belong to an attempt, which are alive), and sends signals to them. Linux only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ratchet_contract.processes.process_start import start_time

_EXEC_TIMEOUT_SECONDS: Final = 5.0  # seconds; tens of milliseconds were measured on a loaded machine
_FREEZE_SECONDS: Final = 5.0
_PF_KTHREAD: Final = 0x00200000  # include/linux/sched.h


def is_alive(pid: int, started: int) -> bool:
    """True if the process with this pid exists, is not a zombie and started at ``started``, in clock ticks since boot."""
    return start_time(pid) == started


def runs_as(pid: int, uid: int) -> bool:
    """True if all user ids of the process (real, effective, saved, file system) are ``uid``. False if it does not exist."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    numbers = next((line.split()[1:] for line in lines if line.startswith("Uid:")), [])
    return set(numbers) == {str(uid)}


def pids_with_variable(name: str, value: str) -> list[int]:
    """Return the sorted pids of other live processes that were started with ``name=value`` in their environment, if readable."""
    return sorted(pid for pid, found in processes_with_variable(name) if found == value)


def processes_with_variable(name: str) -> list[tuple[int, str]]:
    """Return (pid, value) for each other live process that was started with the variable ``name``, if its environment is
    readable."""
    needle = f"\0{name}=".encode()
    out = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        _, found, rest = (b"\0" + _read_environ(int(entry.name))).partition(needle)
        if found and start_time(int(entry.name)) is not None:
            out.append((int(entry.name), os.fsdecode(rest.partition(b"\0")[0])))
    return out


def wait_until_visible(pid: int) -> None:
    """Block for some seconds at most, while a process just spawned is in ``execve``, so that its environment can be read."""
    _read_environ(pid)


def _read_environ(pid: int) -> bytes:
    """Return the environment that the process was started with; empty if it cannot be read. Blocks for some seconds at most while
    the process is in ``execve``."""
    deadline = time.monotonic() + _EXEC_TIMEOUT_SECONDS
    settled = False
    while True:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return b""
        if environ or settled or time.monotonic() > deadline:
            return environ
        settled = not _is_in_exec(pid)  # then read once more: execve may have ended since the last read
        if not settled:
            time.sleep(0.001)


def _is_in_exec(pid: int) -> bool:
    """True if the process is in ``execve``: the kernel has not set the end address of its environment yet."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX" and not int(fields[6]) & _PF_KTHREAD and fields[48] == "0"


def kill(pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Send the signal to the process; nothing if it does not exist. Raises ``PermissionError``."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def kill_all(find_pids: Callable[[], list[int]]) -> list[int]:
    """Send SIGKILL to the processes that ``find_pids`` finds. Call it again until it finds no new ones or time is up; the process
    groups of processes found by later calls are killed, too. Return all pids found, without waiting for their end."""
    found = find_pids()
    for pid in found:
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
    with suppress(ProcessLookupError):
        if os.getsid(pid) == os.getsid(0):
            os.kill(pid, signal_number)
        else:
            os.killpg(os.getpgid(pid), signal_number)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/<pid>/stat`` after the command name; index 0 is the state. None if they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
