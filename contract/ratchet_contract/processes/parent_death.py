"""Ends the service of ``ratchet run``, and its agents, when the command's process has ended for whatever reason, SIGKILL
included.

Each of these processes polls whether the command's process is alive. The kernel's own mechanism (``PR_SET_PDEATHSIG``) does not
suffice: it reports the end of a thread, not of a process, and only to children, and the agents are not the command's children.
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
    """Return the value of ``ENDS_WITH`` for the running process ``pid``: its pid and start time. No later process has the same
    pair, until the machine is restarted."""
    return f"{pid}:{start_time(pid)}"


def is_alive(name: str) -> bool:
    """True if the process that ``name`` (from ``process_name``) identifies exists and is not a zombie."""
    pid, _, started = name.partition(":")
    return pid.isdigit() and started.isdigit() and str(start_time(int(pid))) == started


def end_with_parent(environ: Mapping[str, str]) -> None:
    """Start a daemon thread that sends SIGTERM to this process once the process that ``ENDS_WITH`` in ``environ`` names has
    ended. Return at once. Do nothing if the variable is not set."""
    if name := environ.get(ENDS_WITH):
        threading.Thread(target=_watch, args=(name,), name="parent-death", daemon=True).start()


def _watch(name: str) -> None:
    """Wait until the process that ``name`` identifies has ended, then send SIGTERM to this process."""
    while is_alive(name):
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
