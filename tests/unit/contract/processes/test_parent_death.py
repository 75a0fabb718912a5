"""How a process is named for those that end with it."""

from __future__ import annotations

import os

from ratchet_contract.processes.parent_death import is_alive, process_name

BEYOND_ALL_PIDS = (1 << 22) + 1
"""Linux assigns pids up to 1 << 22."""


def test_running_process_is_alive_and_absent_process_is_not() -> None:
    assert is_alive(process_name(os.getpid()))
    assert not is_alive(process_name(BEYOND_ALL_PIDS))
