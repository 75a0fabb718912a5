"""The queue with few and with very many jobs in it: what a look of the launcher costs, and how quickly people are answered.

On SQLite and on PostgreSQL, both durable; jobs of one owner and of 100. ``RATCHET_BENCH_QUEUED`` sets the larger number of jobs
(default 100000). Then idle slots (``service_slots``; ``RATCHET_BENCH_SLOT_JOBS``, default 100), and Ray Jobs (``service_ray``).
``RATCHET_BENCH_PARTS=queries,slots,ray`` chooses.

- *full*: nothing is free, and everybody has been told so;
- *one starts*: a slot has become free. Both: CPU seconds of a look at the queue, in this process and so without PostgreSQL's
  own, and for how long it held SQLite's write lock, or PostgreSQL's of the slots: all writers wait, or all launchers.
- *last job*, *first page*, *last page*: what `GET /v1/queue` does for them, without HTTP.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event

from benchmarks.databases import opened
from benchmarks.service_ray import against_ray
from benchmarks.service_rows import queue
from benchmarks.service_slots import slots
from benchmarks.stats import machine
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job
from ratchet_service.usecases import pagination
from ratchet_service.usecases import queue as shown
from tests.support.queue_harness import Queue

_LOOKS: Final = 7
_CPUS: Final = 16


def main() -> None:
    print(machine())
    parts = os.environ.get("RATCHET_BENCH_PARTS", "queries,slots,ray").split(",")
    if "queries" in parts:
        _queries()
    for name, part in (("slots", _slots), ("ray", against_ray)):
        if name in parts:
            with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
                part(Path(folder))


def _slots(folder: Path) -> None:
    slots(folder, int(os.environ.get("RATCHET_BENCH_SLOT_JOBS", "100")))


def _queries() -> None:
    many = int(os.environ.get("RATCHET_BENCH_QUEUED", "100000"))
    for engine in ("sqlite", "postgresql"):
        print(
            f"\n{engine}{'':<22} full: CPU, lock ms   one starts: CPU, lock ms   last job   first page   last page, ms"
        )
        for jobs, owners in ((1_000, 1), (1_000, 100), (many, 1), (many, 100)):
            with (
                tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder,
                opened(engine, Path(folder)) as made,
            ):
                print(f"  {jobs:>7} jobs of {owners:>3}: {_row(made, Path(folder), jobs, owners)}", flush=True)


def _row(database: Database, folder: Path, jobs: int, owners: int) -> str:
    plane = Queue(folder, database, cpus=_CPUS)
    running = [plane.submit() for _ in range(_CPUS)]
    assert sorted(plane.run_round()) == sorted(running)
    template = plane.submit()
    plane.run_round()
    queue(database, jobs, owners, template)
    held = Held(database)
    plane.run_round()
    full, starts = [], []
    for _ in range(_LOOKS):
        full.append(held.of(lambda: _nobody(plane)))
        plane.end(running.pop())
        starts.append(held.of(lambda: running.extend(plane.run_round())))
    last = _last(database)
    asked = [
        _seconds(lambda: _asked(database, lambda s: shown.job_entry(s, last))),
        _seconds(lambda: _asked(database, lambda s: shown.page(s, 50, None))),
        _seconds(lambda: _asked(database, lambda s: shown.page(s, 50, _deep(jobs)))),
    ]
    looks = "   ".join(f"{cpu * 1e3:8.1f} {lock * 1e3:8.1f}" for cpu, lock in (_middle(full), _middle(starts)))
    return looks + "   " + "   ".join(f"{seconds * 1e3:8.1f}" for seconds in asked)


def _nobody(plane: Queue) -> None:
    assert plane.run_round() == []


def _last(database: Database) -> str:
    """Of the queue's copies, the newest."""
    newest = sa.select(Job.id).where(Job.phase == "QUEUED").order_by(Job.created_at.desc(), Job.id).limit(1)
    with database.read() as session:
        return str(session.scalar(newest))


def _deep(jobs: int) -> str:
    return pagination.encode(pagination.query_digest(of="queue"), [min(jobs, shown.MAX_POSITION) - 60])


def _asked(database: Database, ask: Callable[[Any], Any]) -> None:
    with database.read() as session:
        assert ask(session).items


def _seconds(call: Callable[[], None]) -> float:
    """The shortest of five, behind one that nobody times: who else uses the machine only adds to it."""
    call()
    out = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        out.append(time.perf_counter() - began)
    return min(out)


class Held:
    """For how long this process's write transactions are open."""

    def __init__(self, database: Database) -> None:
        self._began, self._held = 0.0, 0.0
        event.listen(database.engine, "begin", self._begin)
        event.listen(database.engine, "commit", self._end)
        event.listen(database.engine, "rollback", self._end)

    def _begin(self, connection: sa.Connection) -> None:
        writes = not connection.get_execution_options().get("ratchet_read_only", False)
        self._began = time.perf_counter() if writes else 0.0

    def _end(self, _: sa.Connection) -> None:
        if self._began:
            self._held += time.perf_counter() - self._began
        self._began = 0.0

    def of(self, call: Callable[[], object]) -> tuple[float, float]:
        """Seconds of CPU, and of open write transactions."""
        self._held, cpu = 0.0, time.process_time()
        call()
        return time.process_time() - cpu, self._held


def _middle(found: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(one for one, _ in found), statistics.median(other for _, other in found)


if __name__ == "__main__":
    main()
