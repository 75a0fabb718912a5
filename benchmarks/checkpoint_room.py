"""Is there room for what ``benchmarks.checkpoint`` is about to do? Asked before it begins, not found out after minutes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.checkpoint_jobs import Setup

_MEMORY: Final = Path("/proc/meminfo")
_SHARED: Final = Path("/dev/shm")
_RANK: Final = 400_000_000  # bytes of a process with torch, and of the one that DCP adds


def insist(setups: Sequence[Setup], folder: Path, memory: Path = _MEMORY, shared: Path = _SHARED) -> None:
    """Raises ``SystemExit``, naming the job that needs more than there is, and the variables that make it smaller."""
    for what, need, there in (
        ("memory", memory_of, available(memory)),
        (f"on the disk of {folder}", disk_of, shutil.disk_usage(folder).free),
        (f"in {shared}", shared_of, shutil.disk_usage(shared).free if shared.exists() else 0),
    ):
        largest = max(setups, key=need)
        if need(largest) > there:
            raise SystemExit(
                f"{largest}: needs about {need(largest) / 1e9:.1f} GB {what}, and {there / 1e9:.1f} GB are free. "
                "RATCHET_BENCH_MB, RATCHET_BENCH_SIZES and RATCHET_BENCH_RANKS make it smaller, RATCHET_BENCH_DIR names a disk"
            )


def memory_of(setup: Setup) -> int:
    """Bytes, of all ranks. Each has the state, gradients and DDP's buckets of them, its share for a save and for the plain copy;
    a copy of all for each of DCP's stagers and for Lightning's; when it loads, two copies of all that was read."""
    state = setup.megabytes * 1_000_000
    beside = max(sum("dcp.async" in way or "Lightning" in way for way in setup.ways), 3 if setup.restores else 0)
    processes = 2 if any("process" in way for way in setup.ways) else 1
    return setup.ranks * (state * 5 // 3 + _RANK * processes + state * beside) + 2 * state


def disk_of(setup: Setup) -> int:
    """Bytes: three checkpoints of Ratchet's, of which the oldest goes behind the newest; the plain write; two of the others that
    are kept to be loaded, and the one that has its turn."""
    return setup.megabytes * 1_000_000 * (4 + (3 if setup.ways else 0))


def shared_of(setup: Setup) -> int:
    """Bytes: what is staged in shared memory."""
    return setup.megabytes * 1_000_000 * setup.ranks * sum("shared stager" in way for way in setup.ways)


def available(memory: Path = _MEMORY) -> int:
    """Bytes that processes can have without swapping (``MemAvailable``)."""
    fields = dict(line.split(":", 1) for line in memory.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
