"""Rows that fail in every way, for the tests of what runs them. Standard library only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.gpu.runner import processes_of
from tests.gpu.work import Work


def works(work: Work) -> str:
    work.green("part", "1 of 1")
    return f"on {work.device}"


def raises(work: Work) -> str:
    work.green("before", "fine")
    raise RuntimeError("no kernel image is available")


def is_partly_red(work: Work) -> str:
    work.red("second", "rank 0: Traceback\n" + "  File x, line 1\n" * 200 + "ValueError: 3 tensors differ\n")
    return "2 cases"


def dies(work: Work) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def hangs(work: Work) -> str:
    """With a process in a session of its own that ignores SIGTERM, and a child of that."""
    program = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    while len(processes_of(work.folder)) < 2:
        time.sleep(0.01)
    work.green("first", "two processes")
    time.sleep(600)
    return ""
