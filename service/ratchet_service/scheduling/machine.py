"""GPUs and cores of the machine that trains, detected without torch. An agent host, or else a reconciler that is a separate
process, writes them to ``machine.json`` in the run directory. Other processes read them there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from ratchet_contract.atomic_write import write_atomic
from ratchet_service.scheduling.slots import Capacity

MACHINE_FILE: Final = "machine.json"


@dataclass(frozen=True)
class Machine:
    """What the machine that trains has. ``gpus``: CUDA indices. ``cpus``: the number of cores that jobs may use. ``cpu_slots``
    None: as many as ``cpus``. ``is_this_machine`` False: its files are not inspected from here. ``runs_jobs`` False: jobs run
    elsewhere."""

    gpus: tuple[int, ...] = ()
    cpus: int = 1
    cpu_slots: int | None = None
    python: str = sys.executable
    is_this_machine: bool = True
    torch_cuda: bool = False
    runs_jobs: bool = True

    @property
    def capacity(self) -> Capacity:
        """What the machine lends to jobs: its GPUs, and ``cpu_slots`` or else ``cpus`` CPU slots."""
        return Capacity(self.gpus, self.cpu_slots or self.cpus)


class _MachineFile(BaseModel):
    """The content of ``machine.json``."""

    gpus: tuple[int, ...]
    cpus: int
    cpu_slots: int | None
    python: str
    torch_cuda: bool


def write_machine(home: Path, machine: Machine, torch_cuda: bool) -> None:
    """Write what this machine has to ``machine.json`` in the run directory ``home``. ``torch_cuda``: torch can use CUDA here.
    Raises ``OSError``."""
    content = _MachineFile(
        gpus=machine.gpus,
        cpus=machine.cpus,
        cpu_slots=machine.cpu_slots,
        python=machine.python,
        torch_cuda=torch_cuda,
    )
    write_atomic(home / MACHINE_FILE, content.model_dump_json().encode(), durable=False, mode=0o600)


def read_machine(home: Path) -> Machine | None:
    """Return the machine that ``machine.json`` in the run directory ``home`` describes; None: it cannot be read."""
    try:
        found = _MachineFile.model_validate_json((home / MACHINE_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return Machine(
        found.gpus, found.cpus, found.cpu_slots, found.python, is_this_machine=False, torch_cuda=found.torch_cuda
    )


def detect_machine(cpu_slots: int | None = None, gpus: tuple[int, ...] | None = None) -> Machine:
    """Return what this machine has; ``gpus`` None: its GPUs are detected. Raise ``ValueError`` as ``find_gpus`` does."""
    return Machine(find_gpus() if gpus is None else gpus, len(os.sched_getaffinity(0)), cpu_slots)


def find_gpus() -> tuple[int, ...]:
    """Return the indices of this machine's GPUs that CUDA_VISIBLE_DEVICES leaves. Raise ``ValueError`` as ``visible_gpus``
    does."""
    listed = _query_smi("index")
    if listed is None:
        names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
        listed = [match[1] for match in names if match]
    found = tuple(sorted(int(word) for word in listed if word.isdigit()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None or not found else visible_gpus(visible, found, _uuids)


def visible_gpus(text: str, available: Collection[int], uuids: Callable[[], Mapping[str, int]]) -> tuple[int, ...]:
    """Return the GPUs of ``available`` that CUDA_VISIBLE_DEVICES=``text`` leaves, in that order. ``uuids`` returns UUID ->
    index. Raise ``ValueError`` for some names, such as a repeated one."""
    out: list[int] = []
    for word in (part.strip() for part in text.split(",")):
        if re.fullmatch(r"-?\d+", word):
            index = int(word)
        elif word.startswith("GPU-"):
            matching = [number for uuid, number in uuids().items() if uuid.startswith(word)]
            if len(matching) != 1:
                raise ValueError(f"CUDA_VISIBLE_DEVICES names {word}, and nvidia-smi lists {len(matching)} such GPUs")
            index = matching[0]
        elif word.startswith("MIG-"):
            raise ValueError(
                f"CUDA_VISIBLE_DEVICES names {word}, a part of a GPU: the local launcher allocates whole GPUs, by index"
            )
        else:
            break
        # as CUDA does: the rest is ignored
        if index not in available:
            break
        if index in out:
            raise ValueError(f"CUDA_VISIBLE_DEVICES names GPU {index} twice: CUDA then sees none")
        out.append(index)
    return tuple(out)


def _uuids() -> dict[str, int]:
    """Return UUID -> index of all GPUs, from ``nvidia-smi``; empty if it cannot be run."""
    pairs = (line.partition(",") for line in _query_smi("uuid,index") or ())
    return {uuid.strip(): int(index) for uuid, _, index in pairs if index.strip().isdigit()}


def _query_smi(fields: str) -> list[str] | None:
    """Return the lines that ``nvidia-smi`` prints for these comma-separated fields; None: it cannot be run or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in done.stdout.splitlines()]
