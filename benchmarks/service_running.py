"""Many running jobs looked after by one service: the share of a core that it takes, and how long agents wait for an answer."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

from benchmarks.service_calls import SPEC
from benchmarks.service_http import Link, admin_token, cpu_seconds, memory_mb, process, quantiles, until_written
from ratchet_contract.paths import HomePaths

_SECONDS: Final = 30.0
_DEADLINE: Final = 300.0


def running(engine: str, url: str | None, folder: Path, jobs: int) -> None:
    """Print what ``jobs`` running jobs cost. The agents are one process (``scripts/farm``) that reports like all of them."""
    home, inbox, out, log = folder / "home", folder / "inbox", folder / "farm", folder / "log"
    home.mkdir(mode=0o700)
    inbox.mkdir()
    command = ["benchmarks.scripts.farmed_service", str(home), str(inbox), str(jobs), *([url] if url else [])]
    farmed = ["benchmarks.scripts.farm", str(inbox), str(out)]
    with process(farmed, folder / "farm.log") as farm, process(command, log) as service:
        address = json.loads(until_written(HomePaths(home).service_file, service, log))["url"]
        link = Link(address, admin_token(url))
        begin, at_rest = time.monotonic(), cpu_seconds(service.pid)
        for _ in range(jobs):
            link.call("POST", "/v1/jobs", SPEC)
        submitted = time.monotonic() - begin
        until_running(link, jobs, log, folder / "farm.log")
        started, spent = time.monotonic() - begin, cpu_seconds(service.pid) - at_rest
        time.sleep(5.0)
        _forget(folder)
        before, farm_before, wall = cpu_seconds(service.pid), cpu_seconds(farm.pid), time.monotonic()
        gets = []
        while time.monotonic() - wall < _SECONDS:
            gets.append(link.call("GET", "/v1/jobs?limit=20")[0])
            time.sleep(0.2)
        seconds = time.monotonic() - wall
        share = (cpu_seconds(service.pid) - before) / seconds
        other = (cpu_seconds(farm.pid) - farm_before) / seconds
        lines = [line.split() for part in folder.glob("farm.[0-9]*") for line in part.read_text().splitlines()]
        answers = quantiles([float(parts[1]) for parts in lines])
        late = quantiles([float(parts[2]) for parts in lines])
        listed = quantiles(gets)
        rate = len(lines) / seconds
        print(f"\n{engine}: {jobs} jobs, submitted in {submitted:.1f} s, all running after {started:.1f} s", end="")
        print(f" and {spent:.1f} s of the service's processor time")
        print(f"  service: {share * 100:.0f} % of a core, {memory_mb(service.pid):.0f} MB; {rate:.0f} reports a second")
        print(
            f"  a report's answer: p50 {answers[0]:.1f} ms, p99 {answers[1]:.1f} ms; late by {late[0]:.1f}, {late[1]:.1f} ms"
        )
        print(
            f"  list meanwhile: p50 {listed[0]:.1f} ms, p99 {listed[1]:.1f} ms; agents: {other * 100:.0f} % of a core"
        )


def until_running(link: Link, jobs: int, log: Path, farm_log: Path) -> None:
    """Wait until ``jobs`` jobs are running. Raises ``RuntimeError`` with the ends of both logs."""
    end = time.monotonic() + _DEADLINE
    while True:
        text = link.call("GET", "/metrics")[1]
        counted = next((line for line in text.splitlines() if 'ratchet_jobs{phase="RUNNING"}' in line), "0")
        if float(counted.split()[-1]) >= jobs:
            return
        if time.monotonic() > end:
            raise RuntimeError(
                f"not all are running: {counted}\n{log.read_text()[-2000:]}\n{farm_log.read_text()[-2000:]}"
            )
        time.sleep(0.5)


def _forget(folder: Path) -> None:
    """What was measured while jobs started."""
    for part in folder.glob("farm.[0-9]*"):
        os.truncate(part, 0)
