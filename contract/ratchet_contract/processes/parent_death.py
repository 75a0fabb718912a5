"""Ends a process together with the one that it was started for, however that ended: the service of ``ratchet run``, and its
agents.

The kernel's mechanism (``PR_SET_PDEATHSIG``) follows a thread, and agents are not children of the process that they end with.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Final

from ratchet_contract.env_vars import ENDS_WITH
from ratchet_contract.processes.process_start import start_time

_POLL_SECONDS: Final = 0.5
"""Seconds between two polls."""


def process_name(pid: int) -> str:
    """Return the value of ``ENDS_WITH`` that identifies a process: pid and start time, which no later process has."""
    return f"{pid}:{start_time(pid)}"


def is_alive(name: str) -> bool:
    """True if the process that ``name`` (from ``process_name``) identifies exists and is not a zombie."""
    pid, _, started = name.partition(":")
    return pid.isdigit() and str(start_time(int(pid))) == started


def end_with_parent(environ: Mapping[str, str]) -> None:
    """Start a thread that sends SIGTERM to this process when the process that ``ENDS_WITH`` in ``environ`` names has ended.
    Does nothing without the variable."""
    if name := environ.get(ENDS_WITH):
        threading.Thread(target=_watch, args=(name,), name="parent-death", daemon=True).start()


def _watch(name: str) -> None:
    """Wait until the process has ended, then send SIGTERM to this process."""
    while is_alive(name):
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
