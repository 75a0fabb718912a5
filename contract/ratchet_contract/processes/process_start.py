"""Start time of a process: together with the pid a unique identifier, until the machine is restarted."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
