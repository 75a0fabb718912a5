"""What the processes of a run hold: counted before the faults and after them, when nothing is going on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from ratchet_contract.processes import procfs
from ratchet_service.launchers.local.standby import MODULE
from tests.support.chaos.control_plane_process import PARKED_BY
from tests.support.chaos.world import Part, World, wait_until
from tests.support.server import processes_below

SETTLED: Final = 40.0
"""Seconds until no agent is parked any more, and what was only in use is given free."""
GROWTH: Final = 48 << 20
"""Bytes by which the control plane may be larger afterwards, and in the second half of the faults: about a quarter of it."""
POOL: Final = 12
"""Connections to the database and of clients that a process may keep open, more or fewer than before."""
_LISTENS: Final = "0A"  # in /proc/net/tcp


@dataclass(frozen=True)
class Held:
    """``processes``: live ones and zombies by name, without the database server's; ``ports``: on which they listen;
    ``descriptors``: of each process of the control plane; sockets and SQLite's files apart, as connections are pooled;
    ``shared``: files in /dev/shm; None where others use it, too; ``memory``: proportional set size, in bytes, of the control
    plane and of all that it has started."""

    processes: Counter[str]
    ports: int
    descriptors: dict[str, tuple[int, int]]
    shared: int | None
    memory: int

    def surplus(self, before: Held) -> list[str]:
        """What is held now, and was not before."""
        found = [f"{count} processes {name} more" for name, count in (self.processes - before.processes).items()]
        if self.ports > before.ports:
            found.append(f"{self.ports} ports, {before.ports} before")
        for name, (files, sockets) in self.descriptors.items():
            most = before.descriptors.get(name, (0, 0))
            if files > most[0] or sockets > most[1] + POOL:
                found.append(f"{name}: {files} descriptors and {sockets} of connections, {most} before")
        if self.shared is not None and before.shared is not None and self.shared > before.shared:
            found.append(f"{self.shared} files in /dev/shm, {before.shared} before")
        if self.memory > before.memory + GROWTH:
            found.append(f"{self.memory >> 20} MiB, {before.memory >> 20} before")
        return found

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {files}+{sockets}" for name, (files, sockets) in self.descriptors.items())
        shared = "" if self.shared is None else f", {self.shared} files in /dev/shm"
        return (
            f"{self.processes.total()} processes, {self.ports} ports, descriptors and those of connections {counts}{shared}, "
            f"{self.memory >> 20} MiB"
        )


def parked(part: Part) -> list[int]:
    """Agents that this process of the control plane has parked."""
    if part.process is None or not part.alive:
        return []
    found = procfs.pids_with_variable(PARKED_BY, str(part.told))
    return [pid for pid in found if MODULE.encode() in _read(pid, "cmdline") and procfs.stat(pid) is not None]


def settle(world: World, wanted: Held | None = None) -> Held:
    """Wait until no agent is parked and, if possible, nothing is held that is not in ``wanted``; then count."""
    held = measure(world)

    def settled() -> bool:
        nonlocal held
        if any(parked(part) for part in world.parts):
            return False
        held = measure(world)
        return wanted is None or not held.surplus(wanted)

    wait_until(settled, SETTLED)
    return held


def measure(world: World) -> Held:
    """Now."""
    pids = _run_processes(world)
    names = Counter[str]()
    for pid in pids:
        found, name = procfs.stat(pid), _name(pid)
        if found is not None and name != "postgres":
            names[f"{name} (zombie)" if found.state in "ZX" else name] += 1
    listening = _listening()
    ports = {target for pid in pids for target in _targets(pid) if target in listening}
    descriptors = {}
    for part in world.parts:
        if part.process is not None and part.alive:
            targets = _targets(part.process.pid)
            pooled = ("socket:", str(world.paths.database))
            sockets = sum(target.startswith(pooled) for target in targets)
            descriptors[part.name] = len(targets) - sockets, sockets
    shared = len(list(Path("/dev/shm").iterdir())) if world.disk else None
    return Held(names, len(ports), descriptors, shared, sum(memory(pid) for pid in processes_below(world.paths.home)))


def control_plane_memory(world: World) -> int | None:
    """Bytes of all processes of the control plane together; None if one of them does not run."""
    pids = [part.process.pid for part in world.parts if part.process is not None and part.alive]
    return sum(map(memory, pids)) if len(pids) == len(world.parts) else None


def growth(samples: list[int]) -> str | None:
    """What is wrong if the second half of the samples is larger than the first."""
    half = len(samples) // 2
    if half < 5:
        return None
    first, second = median(samples[:half]), median(samples[half:])
    if second <= first + GROWTH:
        return None
    return f"the control plane has {int(second) >> 20} MiB in the second half of the faults, {int(first) >> 20} in the first"


def memory(pid: int) -> int:
    """Proportional set size, in bytes; 0 of a process that has ended."""
    for line in _read(pid, "smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _run_processes(world: World) -> set[int]:
    """All that this process has started, directly or not, and all that name the run's directory; zombies, too."""
    parents = {pid: found.parent for pid in procfs.pids() if (found := procfs.stat(pid)) is not None}
    own = {os.getpid()}
    for pid in sorted(parents):
        chain = [pid]
        while chain[-1] in parents and chain[-1] not in own:
            chain.append(parents[chain[-1]])
        if chain[-1] in own:
            own.update(chain)
    return (own | set(processes_below(world.paths.home))) - {os.getpid()}


def _listening() -> set[str]:
    """Sockets that listen for connections over TCP, as links of /proc name them."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
            found |= {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENS}
    return found


def _targets(pid: int) -> list[str]:
    """Of its descriptors."""
    found = []
    entries: Iterable[Path] = ()
    with suppress(OSError):
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    for entry in entries:
        with suppress(OSError):
            found.append(str(entry.readlink()))
    return found


def _name(pid: int) -> str:
    return _read(pid, "comm").decode(errors="replace").strip()


def _read(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""
