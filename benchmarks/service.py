"""What the control plane costs: calls with 1,000 and with 1,000,000 jobs in the database, 1,000 running jobs looked after, and
reports of jobs with an experiment tracker and without.

On SQLite and on PostgreSQL, both durable (``synchronous = FULL``, ``fsync = on``). ``RATCHET_BENCH_JOBS`` sets the larger
number of jobs, ``RATCHET_BENCH_CALLS`` (default 300) the calls of each kind, ``RATCHET_BENCH_RUNNING`` (default 1000) the jobs
that run, two simulated ranks each, and ``RATCHET_BENCH_WEBHOOKS`` (default 50) those whose alerts a webhook gets.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from benchmarks.service_calls import calls
from benchmarks.service_running import running
from benchmarks.service_trackers import trackers
from benchmarks.service_webhooks import webhooks
from benchmarks.stats import machine
from tests.support.postgres import postgres_server


def main() -> None:
    print(machine())
    few, many = 1_000, int(os.environ.get("RATCHET_BENCH_JOBS", "1000000"))
    rounds = int(os.environ.get("RATCHET_BENCH_CALLS", "300"))
    jobs = int(os.environ.get("RATCHET_BENCH_RUNNING", "1000"))
    for engine in ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder, databases(engine) as urls:
            calls(engine, urls, Path(folder), few, many, rounds)
        with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder, databases(engine) as urls:
            running(engine, urls[0], Path(folder), jobs)
            trackers(engine, urls[1], Path(folder), rounds)
        with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder, databases(engine) as urls:
            webhooks(engine, urls[0], Path(folder), int(os.environ.get("RATCHET_BENCH_WEBHOOKS", "50")), 7, 10.0)


@contextmanager
def databases(engine: str) -> Iterator[list[str | None]]:
    """Three empty ones; None: the SQLite file of the run directory."""
    if engine == "sqlite":
        yield [None, None, None]
        return
    with postgres_server(durable=True) as url:
        names = ["one", "two", "three"]
        with psycopg.connect(url, autocommit=True) as connection:
            for name in names:
                connection.execute(f"CREATE DATABASE {name}")
        yield [url.replace("/postgres?", f"/{name}?") for name in names]


if __name__ == "__main__":
    main()
