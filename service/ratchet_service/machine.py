"""What this machine has: GPUs and cores, found without importing torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ratchet_service.slots import Capacity


@dataclass(frozen=True)
class Machine:
    """GPUs by CUDA index, and cores that this process may use."""

    gpus: tuple[int, ...] = ()
    cpus: int = 1
    cpu_slots: int | None = None

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.gpus, self.cpu_slots or self.cpus)


def probe(cpu_slots: int | None = None, gpus: tuple[int, ...] | None = None) -> Machine:
    """Look at the machine; ``cpu_slots`` and ``gpus`` replace what is found."""
    return Machine(find_gpus() if gpus is None else gpus, len(os.sched_getaffinity(0)), cpu_slots)


def find_gpus() -> tuple[int, ...]:
    """Indices from ``nvidia-smi``, else from ``/dev/nvidia<N>``; those that CUDA_VISIBLE_DEVICES hides are left out."""
    found = _from_smi()
    if found is None:
        found = tuple(
            sorted(int(m[1]) for p in Path("/dev").glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", p.name)))
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    wanted = [int(word) for word in visible.split(",") if word.strip().isdigit()]
    return tuple(g for g in wanted if g in found)


def _from_smi() -> tuple[int, ...] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(sorted(int(line) for line in done.stdout.split() if line.isdigit()))
