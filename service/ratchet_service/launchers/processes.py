"""Processes seen through /proc: who belongs to an attempt, who is really alive. Linux only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ratchet_contract.process_start import start_time

_EXEC_PATIENCE: Final = 5.0  # seconds; on a loaded machine tens of milliseconds were seen
_FREEZE_SECONDS: Final = 5.0
_PF_KTHREAD: Final = 0x00200000  # include/linux/sched.h


def is_alive(pid: int, started: int) -> bool:
    """Is the process (pid, start time) still there, and no zombie?"""
    return start_time(pid) == started


def is_of(pid: int, uid: int) -> bool:
    """Does the process run as user ``uid`` alone?"""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    numbers = next((line.split()[1:] for line in lines if line.startswith("Uid:")), [])
    return set(numbers) == {str(uid)}


def with_variable(name: str, value: str) -> list[int]:
    """Live processes, other than this one, whose environment at their start had ``name=value``.

    Children inherit it, so grandchildren that left their group and session are found too. Processes of other users, whose
    environment cannot be read, are not.
    """
    return sorted(pid for pid, found in values_of(name) if found == value)


def values_of(name: str) -> list[tuple[int, str]]:
    """Pid and value of live processes, other than this one, that were started with the variable ``name``."""
    needle = f"\0{name}=".encode()
    out = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        _, found, rest = (b"\0" + _environ(int(entry.name))).partition(needle)
        if found and start_time(int(entry.name)) is not None:
            out.append((int(entry.name), os.fsdecode(rest.partition(b"\0")[0])))
    return out


def wait_until_visible(pid: int) -> None:
    """Return when the environment of a process just spawned can be read, or the process has ended."""
    _environ(pid)


def _environ(pid: int) -> bytes:
    """What the process was started with; nothing where it has ended or is another user's.

    Within ``execve``, until the kernel has laid out the new program, ``/proc/<pid>/environ`` is empty, and whoever looks for a
    variable would not know the process: that is waited for. (``posix_spawn`` returns before it is over.)
    """
    deadline = time.monotonic() + _EXEC_PATIENCE
    settled = False
    while True:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return b""
        if environ or settled or time.monotonic() > deadline:
            return environ
        settled = not _within_exec(pid)  # then once more: it may have ended since that was read
        if not settled:
            time.sleep(0.001)


def _within_exec(pid: int) -> bool:
    """The end of the environment is not known yet. One that is empty has an end; a kernel thread never has."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX" and not int(fields[6]) & _PF_KTHREAD and fields[48] == "0"


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def end_all(look: Callable[[], list[int]]) -> list[int]:
    """Kill what ``look`` finds, and what that has started by the next look; the numbers of all that were found.

    What forks faster than it is looked for gets ahead of every list of it, above all where the parent ends and the child goes on.
    So what a second look finds is stopped first, with its whole process group, which the kernel does at one stroke: a stopped
    process forks no more, and takes up its place in its user's limit. Once no look finds another, or after ``_FREEZE_SECONDS``,
    all of them are killed.
    """
    found = look()
    for pid in found:
        kill(pid)
    known = set(found)
    stopped = list[int]()
    deadline = time.monotonic() + _FREEZE_SECONDS
    while found and (more := [pid for pid in look() if pid not in known]):
        for pid in more:
            _stop_group(pid)
        known.update(more)
        stopped += more
        if time.monotonic() > deadline:
            break
    for pid in stopped:
        kill(pid)
    return sorted(known)


def _stop_group(pid: int) -> None:
    """The process with its group, or alone where that is in this process's own session, and so no attempt's."""
    with suppress(ProcessLookupError):
        if os.getsid(pid) == os.getsid(0):
            os.kill(pid, signal.SIGSTOP)
        else:
            os.killpg(os.getpgid(pid), signal.SIGSTOP)


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
