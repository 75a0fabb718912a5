"""What the storage of a report costs, for a job with an experiment tracker and for one without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from benchmarks.service_http import quantiles
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import AttemptPhase, JobPhase
from ratchet_contract.protocol.messages import AgentReport, Metrics, RankBatch
from ratchet_service.agent_reports.ingest import ingest
from ratchet_service.db.api_tokens import hash_token
from ratchet_service.db.engine import Database, sqlite_url, utc_now
from ratchet_service.db.migrate import upgrade
from ratchet_service.db.models import Attempt, AttemptNode, Job

_TOKEN: Final = "token"
_MESSAGES, _SERIES = 10, 8
_JOBS: Final = {"no tracker": "job-aaaaaaaaaaaa", "tracker": "job-bbbbbbbbbbbb"}


def trackers(engine: str, url: str | None, folder: Path, rounds: int) -> None:
    """Print p50 and p99 of ``rounds`` reports of each kind, by turns."""
    database = Database(url or sqlite_url(folder / "trackers.db"))
    upgrade(database)
    for name, job_id in _JOBS.items():
        _add_job(database, job_id, [] if name == "no tracker" else ["tensorboard"])
    times: dict[str, list[float]] = {name: [] for name in _JOBS}
    for number in range(rounds):
        for name, job_id in _JOBS.items():
            report = _report(job_id, number)
            begin = time.perf_counter()
            ingest(database, report, _TOKEN, HomePaths(folder))
            times[name].append(time.perf_counter() - begin)
    database.dispose()
    print(f"\n{engine}: a report of {_MESSAGES} steps with {_SERIES} values each is stored in")
    for name, found in times.items():
        p50, p99 = quantiles(found)
        print(f"  {name:<12} p50 {p50:.2f} ms, p99 {p99:.2f} ms")


def _add_job(database: Database, job_id: str, trackers: list[str]) -> None:
    """Add a running job with one rank."""
    now = utc_now()
    spec = {"world": {"nodes": 1, "ranks_per_node": 1}, "checkpoint": {}}
    with database.write() as session:
        job = Job(id=job_id, name="bench", spec=spec, resolved={"trackers": trackers}, spec_digest="")
        job.phase, job.attempt, job.created_at, job.updated_at = JobPhase.RUNNING, 1, now, now
        session.add(job)
        session.flush()
        session.add(
            Attempt(
                job_id=job_id,
                number=1,
                phase=AttemptPhase.RUNNING,
                report_token_hash=hash_token(_TOKEN),
                created_at=now,
            )
        )
        session.flush()
        session.add(AttemptNode(job_id=job_id, attempt=1, node=0, phase=AttemptPhase.RUNNING))


def _report(job_id: str, number: int) -> AgentReport:
    """Return the report with this number."""
    first = number * _MESSAGES + 1
    messages = [
        Metrics(rank=0, at="2030-01-01T00:00:00Z", step=step, values={f"s{n}": step / (n + 1) for n in range(_SERIES)})
        for step in range(first, first + _MESSAGES)
    ]
    batch = RankBatch(rank=0, from_seq=first, messages=list(messages))
    return AgentReport(job_id=job_id, attempt=1, phase=AttemptPhase.RUNNING, batches=[batch])
