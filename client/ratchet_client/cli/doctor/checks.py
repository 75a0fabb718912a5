"""Runs the checks of ``ratchet doctor``: first the disk alone, so that nothing slows it, then the other checks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ratchet_client.cli.doctor import disk, machine, network, probes
from ratchet_client.cli.doctor.progress import Progress
from ratchet_client.cli.shared.options import Settings
from ratchet_client.http.discovery import home_directory
from ratchet_contract.doctor.findings import Finding

DISK_SECONDS: Final = 60.0
QUICK_SECONDS: Final = 30.0


@dataclass
class Diagnosis:
    """The results of all checks. ``cpu``: the processor's name; ``gpus``: names of the CUDA devices that torch can use."""

    findings: list[Finding] = field(default_factory=list)
    cpu: str = "this CPU"
    gpus: list[str] = field(default_factory=list)

    def failed(self, name: str) -> bool:
        """Return True if a check with this name failed, or if no check with this name has a finding."""
        found = [f.status for f in self.findings if f.name == name]
        return not found or "failed" in found


def run_checks(settings: Settings, python: str | None, report_progress: Progress) -> Diagnosis:
    """Run all checks except the proof of exactness, and return the results. May block for minutes. ``python``: the interpreter
    that trains; None: this one."""
    home = home_directory(settings.home)
    report_progress("the disk of the run directory ...")
    on_disk = probes.with_timeout(
        DISK_SECONDS, "run directory", lambda: disk.probe(home, sqlite=not machine.is_postgres_configured())
    )
    with probes.worker(python or sys.executable) as worker, probes.database(home) as database:
        report_progress("this machine ...")
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
            ("service", lambda: network.service(settings)),
        )
        rows = {name: probes.with_timeout(QUICK_SECONDS, name, check) for name, check in quick}
        report_progress("database ...")
        stored = database()
        report_progress("torch, devices, and a rendezvous of two processes (some seconds) ...")
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
