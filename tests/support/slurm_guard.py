"""Owns the daemons of a throw-away Slurm and all that they start; when its standard input ends, it ends them by their pids.

A process of its own, so that they go with the test whatever kills that. Slurm's step daemons leave their parent on purpose and
come back to this process, which is a subreaper.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Start what a line of standard input names (a log, then the command, tabs between), tell its pid; at the end of the input
    end all descendants, and remove the directory that the argument names."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGCHLD, lambda _number, _frame: _reap())
    for line in sys.stdin:
        log, *command = line.rstrip("\n").split("\t")
        with open(log, "ab") as out:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        print(child.pid, flush=True)
    while found := _descendants():
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    with suppress(OSError):
        Path(sys.argv[1]).parent.rmdir()


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


if __name__ == "__main__":
    main()
