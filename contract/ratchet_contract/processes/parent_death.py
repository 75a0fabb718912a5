"""Ends the service of ``ratchet run``, and its agents, when the command's process has ended, even by SIGKILL."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Final

from ratchet_contract.env_vars import ENDS_WITH
from ratchet_contract.processes.procfs import start_time

_POLL_SECONDS: Final = 0.5
"""Seconds between two polls."""


def process_name(pid: int) -> str:
    """Return an identifier of the running process ``pid``, for the variable ``ENDS_WITH``. It is unique until the machine is
    restarted."""
    return f"{pid}:{start_time(pid)}"


def is_alive(name: str) -> bool:
    """True if the process that ``name`` (from ``process_name``) identifies exists and is not a zombie."""
    pid, _, started = name.partition(":")
    return pid.isdigit() and started.isdigit() and str(start_time(int(pid))) == started


def end_with_parent(environ: Mapping[str, str]) -> None:
    """Start a daemon thread that sends SIGTERM to this process when the process in ``ENDS_WITH``, if set, has ended."""
    if name := environ.get(ENDS_WITH):
        threading.Thread(target=_watch, args=(name,), name="parent-death", daemon=True).start()


def _watch(name: str) -> None:
    """Wait until the process that ``name`` identifies has ended, then send SIGTERM to this process."""
    # Not PR_SET_PDEATHSIG, which reports the end of a thread, and only to the process's children.
    while is_alive(name):
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
