"""Wall clocks that jump: of one process, by as many seconds as a file says. Monotonic clocks go on as ever.

Installed where Ratchet reads wall clocks for what it stores: ``ratchet_service.db.clock`` (all of the service, and with SQLite
its leases) and ``ratchet_worker.ipc.log_lines.now`` (what agents and stand-in ranks write). Not covered: ``time.time`` in the
agent's supervisor, which compares deaths of ranks on one node, and modification times of files, which are the kernel's.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

FILE: Final = "clock-jump"
"""Of an attempt's directory: for its agent and its ranks."""


def install(module: Any, file: Path) -> None:
    """From now on ``module``'s ``datetime``, and its ``time`` if it has one, is ahead by the seconds in ``file``; without one, by
    none."""

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, datetime)

    class Jumping(datetime, metaclass=Kind):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(seconds=_seconds(file))

    module.datetime = Jumping
    if hasattr(module, "time"):
        jumping = {"time_ns": lambda: time.time_ns() + round(_seconds(file) * 1e9)}
        module.time = SimpleNamespace(**vars(time) | jumping)


def _seconds(file: Path) -> float:
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return 0.0
