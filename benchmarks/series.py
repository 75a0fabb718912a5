"""A job of a million steps with ten metrics: what a report costs at its beginning and at its end, and what a read takes.

Beside a table that has every point, thinned by a window function when it is read: the plain way. On SQLite and on PostgreSQL,
both durable. ``RATCHET_BENCH_STEPS`` sets the steps (default 1000000), ``RATCHET_BENCH_CALLS`` (default 20) the timed calls of
each kind. Storing goes through the service's own ``ingest_batches``, reading through its use case: no HTTP, which adds the same
to both.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from benchmarks.databases import opened
from benchmarks.stats import Estimate, estimate, machine
from ratchet_contract.protocol.messages import RankBatch
from ratchet_service.agent_reports.ingest import ingest_batches
from ratchet_service.config.output_limits import Bounds
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Attempt, AttemptNode, Job, Metric
from ratchet_service.db.transitions import lock_job
from ratchet_service.usecases.metrics import metrics

NAMES: Final = tuple(f"metric-{i}" for i in range(10))
_BATCH: Final = 500
_AT: Final = "2030-01-01T00:00:00Z"


def main() -> None:
    print(machine())
    steps = int(os.environ.get("RATCHET_BENCH_STEPS", "1000000"))
    calls = int(os.environ.get("RATCHET_BENCH_CALLS", "20"))
    for engine in ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder, opened(engine, Path(folder)) as database:
            measure(engine, database, steps, calls)


class Told:
    """A job whose rank 0 reports its metrics of every step."""

    def __init__(self, database: Database, number: int, bounds: Bounds, names: Sequence[str] = NAMES) -> None:
        self.database, self.job, self.bounds, self.names = database, f"job-{number:012d}", bounds, names
        self.said = self.step = 0

    def add(self) -> Told:
        """Put the job into the database, of which nothing is there yet."""
        now, spec = utc_now(), {"world": {"nodes": 1, "ranks_per_node": 1}, "checkpoint": {}}
        with self.database.write() as session:
            session.add(
                Job(
                    id=self.job,
                    name="b",
                    spec=spec,
                    resolved={},
                    spec_digest="",
                    attempt=1,
                    created_at=now,
                    updated_at=now,
                )
            )
            session.flush()
            session.add(Attempt(job_id=self.job, number=1, report_token_hash="", created_at=now))
            session.flush()
            session.add(AttemptNode(job_id=self.job, attempt=1, node=0))
        return self

    def report(self) -> float:
        """The next ``_BATCH`` steps; seconds that storing them took."""
        said = [
            {"kind": "metrics", "rank": 0, "at": _AT, "step": step, "values": dict.fromkeys(self.names, step / 3)}
            for step in range(self.step + 1, self.step + _BATCH + 1)
        ]
        batch = RankBatch.model_validate({"rank": 0, "from_seq": self.said + 1, "messages": said})
        begin = time.perf_counter()
        with self.database.write() as session:
            job = lock_job(session, self.job)
            attempt, node = session.get_one(Attempt, (self.job, 1)), session.get_one(AttemptNode, (self.job, 1, 0))
            ingest_batches(session, job, attempt, node, [batch], bounds=self.bounds)
        seconds = time.perf_counter() - begin
        self.said, self.step = self.said + _BATCH, self.step + _BATCH
        return seconds

    def rows(self) -> int:
        with self.database.read() as session:
            count = sa.select(sa.func.count()).select_from(Metric).where(Metric.job_id == self.job)
            return session.scalar(count) or 0


def measure(engine: str, database: Database, steps: int, calls: int) -> None:
    thinned, whole = Told(database, 1, Bounds()).add(), Told(database, 2, Bounds(points=10**15)).add()
    first = [thinned.report() for _ in range(calls)]
    begin = time.perf_counter()
    while thinned.step < steps - calls * _BATCH:
        thinned.report()
    spent = time.perf_counter() - begin
    last = [thinned.report() for _ in range(calls)]
    fill(database, whole, steps - calls * _BATCH)
    plain = [whole.report() for _ in range(calls)]
    read = {most: timed(lambda most=most: kept(thinned, most), calls) for most in (2, 1000, 10_000)}
    reads = min(calls, 5)  # they take seconds
    beside = {most: timed(lambda most=most: windowed(whole, most), reads) for most in (2, 1000)}

    print(
        f"{engine}: {steps} steps, {len(NAMES)} metrics at each; {_BATCH} steps a report; medians with 95 % intervals"
    )
    print(f"  rows: {thinned.rows()} of {whole.rows()}; the whole job was stored at {steps / spent:.0f} steps/s")
    print(f"  report, first {calls}: {ms(first)}; last {calls}: {ms(last)}, {ratio(last, first)} of the first")
    print(f"  report, last {calls}, every point stored: {ms(plain)}; thinned is {ratio(last, plain)} of that")
    for most, found in read.items():
        line = f"  read of all series, max_points {most}: {ms(found)}"
        if most in beside:
            line += f"; of every point, by a window function: {ms(beside[most])}; thinned is {ratio(found, beside[most])} of that"
        print(line, flush=True)


def fill(database: Database, told: Told, steps: int) -> None:
    """Every point of ``steps`` steps, in the database itself."""
    series = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :steps) "
    source = "n" if database.is_sqlite else "generate_series(1, :steps) AS n(i)"
    head = series if database.is_sqlite else ""
    with database.write() as session:
        for name in told.names:
            values = {"job": told.job, "name": name, "steps": steps, "at": utc_now()}
            insert = f"INSERT INTO metrics (job_id, name, step, attempt, value, at) {head}"
            at = sa.bindparam("at", type_=Metric.__table__.c.at.type)
            text = sa.text(f"{insert} SELECT :job, :name, i, 1, i / 3.0, :at FROM {source}").bindparams(at)
            session.execute(text, values)
            row = "INSERT INTO metric_series VALUES (:job, :name, 1, 0, :steps, :steps, :steps, 1)"
            session.execute(sa.text(row), {"job": told.job, "name": name, "steps": steps})
    told.step = steps
    if not database.is_sqlite:
        with database.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            connection.exec_driver_sql("VACUUM ANALYZE metrics")


def kept(told: Told, most: int) -> None:
    with told.database.read() as session:
        metrics(session, told.job, [], most).model_dump_json()


def windowed(told: Told, most: int) -> None:
    """As long as every point was stored, a read thinned them."""
    order = sa.func.row_number().over(partition_by=Metric.name, order_by=Metric.step)
    count = sa.func.count().over(partition_by=Metric.name)
    rows = (
        sa.select(
            Metric.name, Metric.step, Metric.attempt, Metric.value, Metric.at, order.label("row"), count.label("n")
        )
        .where(Metric.job_id == told.job)
        .subquery()
    )
    position, last, parts = rows.c.row - 1, sa.func.nullif(rows.c.n - 1, 0), most - 1
    begins = sa.or_(position == 0, (position * parts) // last != ((position - 1) * parts) // last)
    with told.database.read() as session:
        session.execute(sa.select(rows).where(begins).order_by(rows.c.name, rows.c.step)).all()


def timed(act: Callable[[], Any], calls: int) -> list[float]:
    act()
    out = []
    for _ in range(calls):
        begin = time.perf_counter()
        act()
        out.append(time.perf_counter() - begin)
    return out


def ms(seconds: list[float]) -> str:
    return f"{estimate([1000 * value for value in seconds])} ms"


def ratio(ours: list[float], theirs: list[float]) -> str:
    middle = estimate(theirs).median
    found = estimate([value / middle for value in ours])
    return str(Estimate(found.median, found.low, found.high, found.count))


if __name__ == "__main__":
    main()
