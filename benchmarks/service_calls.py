"""p50 and p99 of calls, with few and with very many jobs in the database."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.service_http import Link, admin_token, cpu_seconds, memory_mb, process, quantiles, until_written
from benchmarks.service_rows import fill, job_id
from ratchet_contract.paths import HomePaths
from ratchet_service.db.engine import Database, sqlite_url

SPEC: Final[dict[str, Any]] = {
    "name": "bench",
    "task": {"entrypoint": "ratchet_worker.tasks.bytelm:ByteLmTask"},
    "world": {"ranks_per_node": 1, "device": "cpu"},
    "resources": {"cpus_per_rank": 1},
    "labels": {"team": "bench"},
}
_IDLE_SECONDS: Final = 10.0
_LIMIT: Final = "limit"


def calls(engine: str, urls: Sequence[str | None], folder: Path, few: int, many: int, rounds: int) -> None:
    """Print a table: every call with ``few`` and with ``many`` jobs, and against the least that the libraries cost. ``urls``: a
    database for each of both, and one for that least; None: SQLite."""
    with ExitStack() as stack:
        small = Crowd(stack, folder / "few", urls[0], few)
        large = Crowd(stack, folder / "many", urls[1], many)
        print(f"\n{engine}: {many} jobs, filled in {large.seconds:.0f} s", flush=True)
        found = measure([small, large], rounds)
        memory = memory_mb(large.service.pid)
        answer = json.dumps(small.link.call("GET", f"/v1/jobs/{job_id(1)}")[1])
    limits = _bare(folder, urls[2] or sqlite_url(folder / "bare.db"), answer, rounds)
    _print(found, limits, few, many)
    print(f"  service: {memory:.0f} MB resident after {sum(map(len, found[1].values()))} calls")
    _idle(large, many)


_OPTIONS: Final = ("--no-reconciler", "--request-rate", "1000000")  # one caller asks as often as it can


class Crowd:
    """A service without a reconciler over a database of ``jobs`` ended jobs."""

    def __init__(self, stack: ExitStack, folder: Path, url: str | None, jobs: int) -> None:
        folder.mkdir()
        self.home, self.log, self.jobs = folder / "home", folder / "log", jobs
        self.home.mkdir(mode=0o700)
        self.env = {} if url is None else {"RATCHET_DATABASE_URL": url}
        self.service = stack.enter_context(self.serve())
        self.link = self.connect(self.service)
        template = self.link.call("POST", "/v1/jobs", SPEC)[1]["id"]
        self.link.call("POST", f"/v1/jobs/{template}/cancel")
        database = Database(url or sqlite_url(HomePaths(self.home).database))
        begin = time.monotonic()
        fill(database, 1, jobs, template)
        self.seconds = time.monotonic() - begin
        database.dispose()

    def serve(self) -> AbstractContextManager[subprocess.Popen[bytes]]:
        return process(["ratchet_service", "serve", "--home", str(self.home), *_OPTIONS], self.log, self.env)

    def connect(self, service: subprocess.Popen[bytes]) -> Link:
        url = json.loads(until_written(HomePaths(self.home).service_file, service, self.log))["url"]
        return Link(url, admin_token(self.env.get("RATCHET_DATABASE_URL")))


def ways(crowd: Crowd) -> dict[str, Callable[[], tuple[float, Any]]]:
    link, draw, jobs = crowd.link, random.Random(crowd.jobs), crowd.jobs
    cursor = _deep_cursor(link, jobs)
    return {
        "submit": lambda: link.call("POST", "/v1/jobs", SPEC, Idempotency_Key=str(draw.random())),
        "get": lambda: link.call("GET", f"/v1/jobs/{job_id(draw.randint(1, jobs))}"),
        "attempts": lambda: link.call("GET", f"/v1/jobs/{job_id(draw.randint(1, jobs))}/attempts"),
        "events": lambda: link.call("GET", f"/v1/jobs/{job_id(draw.randint(1, jobs))}/events"),
        "list, newest": lambda: link.call("GET", "/v1/jobs?limit=20"),
        "list, deep page": lambda: link.call("GET", f"/v1/jobs?limit=20&cursor={cursor}"),
        "list, phase FAILED": lambda: link.call("GET", "/v1/jobs?limit=10&phase=FAILED"),
        "list, phase RUNNING (none)": lambda: link.call("GET", "/v1/jobs?limit=20&phase=RUNNING"),
        "list, label": lambda: link.call("GET", f"/v1/jobs?limit=20&label=team%3Dt-{draw.randint(0, 49)}"),
        "list, label of nobody": lambda: link.call("GET", "/v1/jobs?limit=20&label=team%3Dnobody"),
        "list, name": lambda: link.call("GET", f"/v1/jobs?limit=20&name=n-{draw.randint(0, 49)}"),
        "list, label and owner": lambda: link.call("GET", "/v1/jobs?limit=20&label=team%3Dt-7&owner=o-7"),
        "list, by name": lambda: link.call("GET", "/v1/jobs?limit=20&sort=name"),
        "metrics (Prometheus)": lambda: link.call("GET", "/metrics"),
    }


def measure(crowds: Sequence[Crowd], rounds: int) -> list[dict[str, list[float]]]:
    """Seconds of each call, calls and databases by turns, so that a slow moment meets them all."""
    several = [ways(crowd) for crowd in crowds]
    for each in several:
        for call in each.values():  # connections, caches, compiled statements
            call()
    out: list[dict[str, list[float]]] = [{name: [] for name in each} for each in several]
    for number in range(rounds):
        for name in several[0]:
            if name.startswith("metrics") and number % 30:
                continue
            for which in range(len(several)) if number % 2 == 0 else reversed(range(len(several))):
                out[which][name].append(several[which][name]()[0])
    return out


def _deep_cursor(link: Link, jobs: int) -> str:
    """Of a page some way into the list."""
    cursor = ""
    for _ in range(min(20, jobs // 200)):
        page = link.call("GET", f"/v1/jobs?limit=100{cursor and f'&cursor={cursor}'}")[1]
        cursor = page["next_cursor"]
    return cursor


def _bare(folder: Path, url: str, answer: str, rounds: int) -> dict[str, list[float]]:
    """The same libraries with nothing of ours but one row, or the same bytes."""
    port, log = folder / "port", folder / "bare.log"
    (folder / "answer").write_text(answer)
    with process(["benchmarks.scripts.bare_app", url, str(folder / "answer"), str(port)], log) as bare:
        link = Link(f"http://127.0.0.1:{until_written(port, bare, log)}")
        out: dict[str, list[float]] = {"submit": [], "get": []}
        for number in range(rounds + 20):
            written, read = link.call("POST", "/row", SPEC)[0], link.call("GET", "/answer")[0]
            if number >= 20:
                out["submit"].append(written)
                out["get"].append(read)
    return out


def _print(found: list[dict[str, list[float]]], limits: dict[str, list[float]], few: int, many: int) -> None:
    print(f"  {'ms':<28} {f'{few} jobs':>16} {f'{many} jobs':>18}   p50 ratio   p99 ratio")
    for name, values in found[0].items():
        a, b = quantiles(values), quantiles(found[1][name])
        text = f"  {name:<28} {a[0]:7.2f} {a[1]:8.2f}   {b[0]:7.2f} {b[1]:8.2f}      {b[0] / a[0]:6.2f}      {b[1] / a[1]:6.2f}"
        if name in limits:
            c = quantiles(limits[name])
            text += f"   {_LIMIT} {c[0]:.2f} {c[1]:.2f}: {b[0] / c[0]:.1f}x, {b[1] / c[1]:.1f}x"
        print(text + ("" if b[0] / a[0] <= 2 else "   NOT FLAT"))


def _idle(crowd: Crowd, many: int) -> None:
    """A reconciler with nothing to do costs a share of a core; the jobs that were submitted are cancelled first."""
    with crowd.serve() as service:
        link = crowd.connect(service)
        while queued := link.call("GET", "/v1/jobs?phase=QUEUED&limit=100")[1]["items"]:
            for job in queued:
                link.call("POST", f"/v1/jobs/{job['id']}/cancel")
    with process(["ratchet_service", "reconcile", "--home", str(crowd.home)], crowd.log, crowd.env) as reconciler:
        time.sleep(5.0)  # its start
        before = cpu_seconds(reconciler.pid)
        time.sleep(_IDLE_SECONDS)
        share = (cpu_seconds(reconciler.pid) - before) / _IDLE_SECONDS
        print(f"  a reconciler with {many} ended jobs and nothing to do: {share * 100:.1f} % of a core")
