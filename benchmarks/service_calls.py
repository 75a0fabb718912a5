"""p50 and p99 of calls, with few and with very many jobs in the database."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.service_http import Link, cpu_seconds, memory_mb, process, quantiles, until_written
from benchmarks.service_rows import fill, job_id
from ratchet_contract.paths import HomePaths
from ratchet_service.database import Database, sqlite_url

SPEC: Final[dict[str, Any]] = {
    "name": "bench",
    "task": {"entrypoint": "ratchet_worker.tasks.bytelm:ByteLmTask"},
    "world": {"ranks_per_node": 1, "device": "cpu"},
    "resources": {"cpus_per_rank": 1},
    "labels": {"team": "bench"},
}
_IDLE_SECONDS: Final = 10.0
_LIMIT: Final = "limit"


def calls(engine: str, url: str | None, folder: Path, few: int, many: int, rounds: int) -> None:
    """Print a table: every call with ``few`` and with ``many`` jobs, and against the least that the libraries cost."""
    home, log = folder / "home", folder / "log"
    home.mkdir(mode=0o700)
    env = {} if url is None else {"RATCHET_DATABASE_URL": url}
    with process(["ratchet_service", "serve", "--home", str(home), "--no-reconciler"], log, env) as service:
        link = Link(json.loads(until_written(HomePaths(home).service_file, service, log))["url"])
        template = link.call("POST", "/v1/jobs", SPEC)[1]["id"]
        link.call("POST", f"/v1/jobs/{template}/cancel")
        (folder / "answer").write_text(json.dumps(link.call("GET", f"/v1/jobs/{template}")[1]))
        database = Database(url or sqlite_url(HomePaths(home).database))
        found: dict[int, dict[str, list[float]]] = {}
        fill(database, 1, few, template)
        found[few] = _measure(link, few, rounds)
        begin = time.monotonic()
        fill(database, few + 1, many, template)
        print(f"\n{engine}: {many} jobs, filled in {time.monotonic() - begin:.0f} s", flush=True)
        found[many] = _measure(link, many, rounds)
        database.dispose()
        memory = memory_mb(service.pid)
    limits = _bare(folder, url or sqlite_url(folder / "bare.db"), rounds)
    _print(found, limits, few, many)
    print(f"  service: {memory:.0f} MB resident after {sum(map(len, found[many].values())) * 2} calls")
    _idle(home, log, env, many)


def _measure(link: Link, jobs: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, the calls by turns, so that a slow moment meets them all."""
    draw = random.Random(jobs)
    cursor = _deep_cursor(link, jobs)
    ways: dict[str, Callable[[], tuple[float, Any]]] = {
        "submit": lambda: link.call("POST", "/v1/jobs", SPEC, Idempotency_Key=str(draw.random())),
        "get": lambda: link.call("GET", f"/v1/jobs/{job_id(draw.randint(1, jobs))}"),
        "attempts": lambda: link.call("GET", f"/v1/jobs/{job_id(draw.randint(1, jobs))}/attempts"),
        "events": lambda: link.call("GET", f"/v1/jobs/{job_id(draw.randint(1, jobs))}/events"),
        "list, newest": lambda: link.call("GET", "/v1/jobs?limit=20"),
        "list, deep page": lambda: link.call("GET", f"/v1/jobs?limit=20&cursor={cursor}"),
        "list, phase FAILED": lambda: link.call("GET", "/v1/jobs?limit=20&phase=FAILED"),
        "list, phase RUNNING (none)": lambda: link.call("GET", "/v1/jobs?limit=20&phase=RUNNING"),
        "list, label": lambda: link.call("GET", f"/v1/jobs?limit=20&label=team%3Dt-{draw.randint(0, 999)}"),
        "list, label of nobody": lambda: link.call("GET", "/v1/jobs?limit=20&label=team%3Dnobody"),
        "list, name": lambda: link.call("GET", f"/v1/jobs?limit=20&name=n-{draw.randint(0, 999)}"),
        "list, by name": lambda: link.call("GET", "/v1/jobs?limit=20&sort=name"),
        "metrics (Prometheus)": lambda: link.call("GET", "/metrics"),
    }
    for call in ways.values():  # connections, caches, compiled statements
        call()
    out: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, call in ways.items():
            if name.startswith("metrics") and number % 30:
                continue
            out[name].append(call()[0])
    return out


def _deep_cursor(link: Link, jobs: int) -> str:
    """Of a page some way into the list."""
    cursor = ""
    for _ in range(min(20, jobs // 200)):
        page = link.call("GET", f"/v1/jobs?limit=100{cursor and f'&cursor={cursor}'}")[1]
        cursor = page["next_cursor"]
    return cursor


def _bare(folder: Path, url: str, rounds: int) -> dict[str, list[float]]:
    """The same libraries with nothing of ours but one row, or the same bytes."""
    port, log = folder / "port", folder / "bare.log"
    with process(["benchmarks.scripts.bare_app", url, str(folder / "answer"), str(port)], log) as bare:
        link = Link(f"http://127.0.0.1:{until_written(port, bare, log)}")
        out: dict[str, list[float]] = {"submit": [], "get": []}
        for number in range(rounds + 20):
            written, read = link.call("POST", "/row", SPEC)[0], link.call("GET", "/answer")[0]
            if number >= 20:
                out["submit"].append(written)
                out["get"].append(read)
    return out


def _print(found: dict[int, dict[str, list[float]]], limits: dict[str, list[float]], few: int, many: int) -> None:
    print(f"  {'ms':<28} {f'{few} jobs':>16} {f'{many} jobs':>18}   p50 ratio   p99 ratio")
    for name, values in found[few].items():
        a, b = quantiles(values), quantiles(found[many][name])
        text = f"  {name:<28} {a[0]:7.2f} {a[1]:8.2f}   {b[0]:7.2f} {b[1]:8.2f}      {b[0] / a[0]:6.2f}      {b[1] / a[1]:6.2f}"
        if name in limits:
            c = quantiles(limits[name])
            text += f"   {_LIMIT} {c[0]:.2f} {c[1]:.2f}: {b[0] / c[0]:.1f}x, {b[1] / c[1]:.1f}x"
        print(text + ("" if b[0] / a[0] <= 2 else "   NOT FLAT"))


def _idle(home: Path, log: Path, env: dict[str, str], many: int) -> None:
    """A reconciler with nothing to do costs a share of a core; the jobs that were submitted are cancelled first."""
    with process(["ratchet_service", "serve", "--home", str(home), "--no-reconciler"], log, env) as service:
        link = Link(json.loads(until_written(HomePaths(home).service_file, service, log))["url"])
        while queued := link.call("GET", "/v1/jobs?phase=QUEUED&limit=100")[1]["items"]:
            for job in queued:
                link.call("POST", f"/v1/jobs/{job['id']}/cancel")
        with process(["ratchet_service", "reconcile", "--home", str(home)], log, env) as reconciler:
            time.sleep(5.0)  # its start
            before = cpu_seconds(reconciler.pid)
            time.sleep(_IDLE_SECONDS)
            share = (cpu_seconds(reconciler.pid) - before) / _IDLE_SECONDS
            print(f"  a reconciler with {many} ended jobs and nothing to do: {share * 100:.1f} % of a core")
