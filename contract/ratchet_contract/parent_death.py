"""A process that ends with the one that it was started for, however that ended: the service of ``ratchet run``, and its agents.

The kernel's own means (``PR_SET_PDEATHSIG``) follows a thread, and agents are no children of the process that they end with.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Final

from ratchet_contract.environment import ENDS_WITH
from ratchet_contract.process_start import start_time

_PERIOD: Final = 0.5
"""Seconds between two looks."""


def name_of(pid: int) -> str:
    """What ``ENDS_WITH`` names a process by: pid and start time, which no later process has."""
    return f"{pid}:{start_time(pid)}"


def is_alive(name: str) -> bool:
    """Whether the process that ``name_of`` gave ``name`` is there, and no zombie."""
    pid, _, started = name.partition(":")
    return pid.isdigit() and str(start_time(int(pid))) == started


def end_with_parent(environ: Mapping[str, str]) -> None:
    """From now on SIGTERM comes to this process once the one that ``ENDS_WITH`` names has ended; without the variable never."""
    if name := environ.get(ENDS_WITH):
        threading.Thread(target=_watch, args=(name,), name="parent-death", daemon=True).start()


def _watch(name: str) -> None:
    while is_alive(name):
        time.sleep(_PERIOD)
    os.kill(os.getpid(), signal.SIGTERM)
