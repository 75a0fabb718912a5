"""All checks in their order: the disk alone, so that its speed is its own; then slow processes and quick checks at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ratchet_client.cli.common import Settings
from ratchet_client.cli.doctor import disk, machine, network, probes
from ratchet_client.cli.doctor.progress import Progress
from ratchet_client.discovery import home_directory
from ratchet_contract.findings import Finding

DISK_SECONDS: Final = 60.0
QUICK_SECONDS: Final = 30.0


@dataclass
class Diagnosis:
    """``cpu``: the processor's name; ``gpus``: names of the CUDA devices that the worker's torch can use."""

    findings: list[Finding] = field(default_factory=list)
    cpu: str = "this CPU"
    gpus: list[str] = field(default_factory=list)

    def failed(self, name: str) -> bool:
        """Whether the check of this name failed or could not even begin."""
        found = [f.status for f in self.findings if f.name == name]
        return not found or "failed" in found


def examine(given: Settings, python: str | None, say: Progress) -> Diagnosis:
    """Everything but the proof of exactness."""
    home = home_directory(given.home)
    say("the disk of the run directory ...")
    on_disk = probes.within(DISK_SECONDS, "run directory", lambda: disk.probe(home))
    with probes.worker(python or sys.executable) as worker, probes.database(home) as database:
        say("this machine ...")
        limits = machine.cgroup_limits()
        quick: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
            ("python", machine.installation),
            (
                "cpu",
                lambda: [
                    machine.cores(limits),
                    machine.memory(limits),
                    machine.shared_memory(),
                    machine.open_files(),
                    machine.most_processes(),
                ],
            ),
            ("clock", machine.clock),
            ("loopback", lambda: [network.loopback(), *network.proxies()]),
            ("service", lambda: network.service(given)),
        )
        rows = {name: probes.within(QUICK_SECONDS, name, check) for name, check in quick}
        say("database ...")
        stored = database()
        say("torch, devices, and two processes that meet (some seconds) ...")
        trains = worker()
    order = [
        rows["python"],
        trains.findings,
        rows["cpu"],
        on_disk,
        rows["loopback"],
        stored.findings,
        rows["service"],
        rows["clock"],
    ]
    return Diagnosis([finding for part in order for finding in part], trains.cpu or "this CPU", trains.gpus)
