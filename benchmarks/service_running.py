"""Many running jobs looked after by one service: the share of a core that service and database take, counted apart from the load,
and how soon a request to stop a job reaches its agent."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks.service_calls import SPEC
from benchmarks.service_http import Link, admin_token, cpu_seconds, memory_mb, process, quantiles, until_written
from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import procfs

RANKS: Final = 2
"""Of each job."""
AIM_CORES: Final = 1.0
"""Of a core: service and database together."""
AIM_STOP_SECONDS: Final = 2.0
"""p99, from the request to stop a job until its agent knows."""
_SECONDS: Final = 30.0
_SETTLE: Final = 15.0
"""Seconds until the delays that the service requests have settled."""
_STOPS: Final = 200
_STOP_PAUSE: Final = 0.1
_DEADLINE: Final = 300.0


@contextmanager
def farmed(url: str | None, folder: Path, jobs: int, *options: str) -> Iterator[tuple[Link, int, int]]:
    """A service with ``jobs`` submitted jobs of two ranks, whose agents are one process (``scripts/farm``, with ``options``), in
    ``folder``. Yields a connection and the pids of service and farm, once all jobs are running."""
    home, inbox, out, log = folder / "home", folder / "inbox", folder / "farm", folder / "log"
    home.mkdir(mode=0o700)
    inbox.mkdir()
    slots = str(jobs * RANKS)
    command = ["benchmarks.scripts.farmed_service", str(home), str(inbox), slots, *([url] if url else [])]
    load = ["benchmarks.scripts.farm", str(inbox), str(out), *options]
    with process(load, folder / "farm.log") as farm, process(command, log) as service:
        link = Link(json.loads(until_written(HomePaths(home).service_file, service, log))["url"], admin_token(url))
        begin, at_rest = time.monotonic(), cpu_seconds(service.pid)
        spec = SPEC | {"world": {"ranks_per_node": RANKS, "device": "cpu"}}
        for _ in range(jobs):
            link.call("POST", "/v1/jobs", spec)
        submitted = time.monotonic() - begin
        until_running(link, jobs, log, folder / "farm.log")
        started, spent = time.monotonic() - begin, cpu_seconds(service.pid) - at_rest
        print(
            f"\n{jobs} jobs of {RANKS} ranks: submitted in {submitted:.1f} s, all running after {started:.1f} s", end=""
        )
        print(f" and {spent:.1f} s of the service's processor time")
        yield link, service.pid, farm.pid


def running(engine: str, url: str | None, folder: Path, jobs: int) -> None:
    """Print what ``jobs`` running jobs cost, and how soon their agents know of a request to stop."""
    with farmed(url, folder, jobs) as (link, service, farm):
        time.sleep(_SETTLE)
        _print_load(engine, url, folder, link, service, farm)
        _print_stops(engine, url, folder, link, service)


def _print_load(engine: str, url: str | None, folder: Path, link: Link, service: int, farm: int) -> None:
    reports = folder / "farm.reports"
    os.truncate(reports, 0)
    spent, gets = Spent(service, url), []
    farm_before = cpu_seconds(farm)
    while spent.seconds < _SECONDS:
        gets.append(link.call("GET", "/v1/jobs?limit=20")[0])
        time.sleep(0.2)
    lines = [line.split() for line in reports.read_text().splitlines()]
    spent.print(engine)
    load = (cpu_seconds(farm) - farm_before) / spent.seconds
    answers, late = (quantiles([float(parts[index]) for parts in lines]) for index in (1, 2))
    listed = quantiles(gets)
    print(f"  {len(lines) / spent.seconds:.0f} reports a second; service: {memory_mb(service):.0f} MB", end="")
    print(f"; the load itself, not counted: {load * 100:.0f} % of a core")
    print(f"  a report's answer: p50 {answers[0]:.1f} ms, p99 {answers[1]:.1f} ms", end="")
    print(f"; list meanwhile: p50 {listed[0]:.1f} ms, p99 {listed[1]:.1f} ms; load late by p99 {late[1]:.1f} ms")


def _print_stops(engine: str, url: str | None, folder: Path, link: Link, service: int) -> None:
    """Suspend jobs, drawn by chance, one after another while the others go on."""
    stops, asked = folder / "farm.stops", dict[str, float]()
    some = _running_jobs(link)
    spent = Spent(service, url)
    for job_id in random.Random(0).sample(some, min(_STOPS, len(some) // 2)):
        asked[job_id] = time.time()
        link.call("POST", f"/v1/jobs/{job_id}/suspend")
        time.sleep(_STOP_PAUSE)
    end = time.monotonic() + 60.0
    while len(heard := [line.split() for line in stops.read_text().splitlines()]) < len(asked):
        if time.monotonic() > end:
            raise RuntimeError(f"only {len(heard)} of {len(asked)} stop requests have reached their agents")
        time.sleep(0.2)
    took = [float(at) - asked[job_id] for job_id, at in heard]
    p50, p99 = quantiles(took)
    print(f"  from POST suspend to its agent, {len(took)} jobs: p50 {p50 / 1e3:.2f} s, p99 {p99 / 1e3:.2f} s", end="")
    print(f" (aim: at most {AIM_STOP_SECONDS:g} s), longest {max(took):.2f} s; meanwhile")
    spent.print(engine)


def _running_jobs(link: Link) -> list[str]:
    found, cursor = list[str](), ""
    while True:
        page: Any = link.call("GET", f"/v1/jobs?phase=RUNNING&limit=100{cursor}")[1]
        found += [job["id"] for job in page["items"]]
        if page["next_cursor"] is None:
            return found
        cursor = f"&cursor={page['next_cursor']}"


class Spent:
    """The processor time of a service and of its database server since this was made."""

    def __init__(self, service: int, url: str | None) -> None:
        self._service, self._server = service, None if url is None else _postgres_pid(url)
        self._begin = time.monotonic()
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        return cpu_seconds(self._service), 0.0 if self._server is None else group_cpu_seconds(self._server)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def print(self, engine: str) -> None:
        seconds, now = self.seconds, self._now()
        service, server = ((after - before) / seconds for before, after in zip(self._before, now, strict=True))
        parts = f"service {service * 100:.0f} %" + (f" + database {server * 100:.0f} %" if self._server else "")
        total = f"{(service + server) * 100:.0f} % of a core (aim: at most {AIM_CORES * 100:.0f} %)"
        print(f"  {engine}: {parts} = {total}")


def _postgres_pid(url: str) -> int:
    """The server's first process: the parent of the one that serves a connection."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        return _parent(row[0])


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def group_cpu_seconds(pid: int) -> float:
    """User and system time so far of a process, of its children, and of those that have ended."""
    own = sum(map(int, _stat(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return own + sum(cpu_seconds(child) for child in found if (known := procfs.stat(child)) and known.parent == pid)


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
