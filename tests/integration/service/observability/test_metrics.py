"""What ``/metrics`` tells, of an API and of a reconciler alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import JobPhase
from ratchet_service.api.health_server import serve_health
from ratchet_service.config.network import Listening
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, Job
from ratchet_service.observability import metrics as instruments_module
from ratchet_service.observability.health import Health
from ratchet_service.observability.metrics import Instruments
from tests.support.api import Api
from tests.support.control_plane import Plane
from tests.support.server import wait_for


def samples(text: str) -> dict[str, float]:
    """By name and labels, as the text has them."""
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database)
    yield made
    made.close()


def test_metrics_count_ended_attempts_checkpoints_and_reconciler_rounds(control_plane: Plane) -> None:
    instruments = Instruments()
    with instruments.count_commits(control_plane.database):
        control_plane.serve_api()
        reconciler = control_plane.start_reconciler()
        reconciler._instruments = instruments  # the plane's own are nobody's
        job_id = control_plane.submit({"steps": 40, "every": 10, "epochs": {"1": {"at": 25, "do": "kill"}}})
        control_plane.wait(job_id, JobPhase.SUCCEEDED)
    saved = len(control_plane.checkpoints(job_id))
    with control_plane.database.read() as session:
        lost = session.scalar(sa.select(Attempt.steps_lost).where(Attempt.job_id == job_id, Attempt.number == 1))

    def told() -> dict[str, float]:
        return samples(instruments.render(control_plane.database).decode())

    found = wait_for(lambda: told() if told()["ratchet_reconciler_round_seconds_count"] > 1 else None, "rounds", 10)
    assert found['ratchet_attempts_ended_total{cause="rank-killed",outcome="failed"}'] == 1
    assert found['ratchet_attempts_ended_total{cause="completed",outcome="succeeded"}'] == 1
    assert found['ratchet_steps_lost_total{cause="rank-killed"}'] == lost
    assert found["ratchet_checkpoint_bytes_count"] == saved
    assert found["ratchet_checkpoint_bytes_sum"] == sum(c.size for c in control_plane.checkpoints(job_id))
    assert found['ratchet_jobs{phase="SUCCEEDED"}'] == 1
    assert not any(job_id in name for name in found)


def test_metrics_show_the_queue_by_reason_and_refresh_ended_jobs_slowly(api: Api) -> None:
    now = [0.0]
    told = Instruments(clock=lambda: now[0])
    jobs = [api.submit() for _ in range(4)]
    with api.database.write() as session:
        for job_id, reason in zip(jobs, ("no-slot", "something-new", None, "higher-priority"), strict=True):
            session.execute(sa.update(Job).where(Job.id == job_id).values(reason=reason))
    found = samples(told.render(api.database).decode())
    assert {name for name in found if name.startswith("ratchet_queue_jobs")} == {
        f'ratchet_queue_jobs{{reason="{reason}"}}' for reason in ("no-slot", "other", "none", "higher-priority")
    }
    assert found['ratchet_queue_oldest_seconds{reason="no-slot"}'] >= 0
    api.set_phase(jobs[0], JobPhase.SUCCEEDED)
    found = samples(told.render(api.database).decode())
    assert (found['ratchet_jobs{phase="QUEUED"}'], found['ratchet_jobs{phase="SUCCEEDED"}']) == (3, 0)
    assert 'ratchet_queue_jobs{reason="no-slot"}' not in found
    now[0] += 121
    assert samples(told.render(api.database).decode())['ratchet_jobs{phase="SUCCEEDED"}'] == 1


def test_metrics_scrape_does_not_wait_for_the_count_of_ended_jobs(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    told = Instruments(clock=lambda: now[0])
    job = api.submit()

    def succeeded() -> float:
        return samples(told.render(api.database).decode())['ratchet_jobs{phase="SUCCEEDED"}']

    assert succeeded() == 0
    api.set_phase(job, JobPhase.SUCCEEDED)
    now[0] += 61
    count, may_count = instruments_module._count_by_phase, threading.Event()

    def slow(session: Session, phases: tuple[JobPhase, ...]) -> dict[JobPhase, int]:
        if JobPhase.SUCCEEDED in phases:
            assert may_count.wait(60)
        return count(session, phases)

    monkeypatch.setattr(instruments_module, "_count_by_phase", slow)
    assert [succeeded(), succeeded()] == [0, 0]
    may_count.set()
    wait_for(lambda: succeeded() == 1, "the next count")


def test_metrics_count_reports_by_result(api: Api) -> None:
    job = api.submit()
    api.attempt(job)

    def told() -> dict[str, float]:
        found = samples(api.client.get("/metrics").text)
        return {
            word: found.get(f'ratchet_reports_total{{result="{word}"}}', 0) for word in ("stored", "stale", "refused")
        }

    before = told()
    assert api.report(job).status_code == 200
    assert api.report(job, protocol=999).status_code == 400
    api.attempt(job, 2)
    assert api.report(job).status_code == 409
    assert {word: number - before[word] for word, number in told().items()} == {"stored": 1, "stale": 1, "refused": 1}
    assert re.search(r'ratchet_build_info\{protocol="\d+",version="[^"]+"\} 1', api.client.get("/metrics").text)


def test_standalone_reconciler_serves_metrics_and_health_on_a_port(control_plane: Plane) -> None:
    instruments, health = Instruments(), Health()
    instruments.observe_round(0.2, failed=True)
    listen = Listening(port=0)
    with serve_health(listen, health, control_plane.database, control_plane.paths, instruments) as port:
        base = f"http://127.0.0.1:{port}"
        assert samples(httpx.get(f"{base}/metrics", verify=False).text)["ratchet_reconciler_failed_rounds_total"] == 1
        assert httpx.get(f"{base}/metrics?x=1", verify=False).status_code == 200, "a query has no effect, as in the API"
        assert httpx.get(f"{base}/healthz", verify=False).json()["status"] == "ok"
        assert set(httpx.get(f"{base}/readyz", verify=False).json()["components"]) == {
            "database",
            "run_directory",
            "reconciler",
        }
        assert httpx.get(f"{base}/v1/jobs", verify=False).status_code == 404
        health.stopping = True
        answer = httpx.get(f"{base}/readyz", verify=False)
        assert (answer.status_code, answer.json()["code"]) == (503, "shutting-down")
        assert httpx.get(f"{base}/healthz", verify=False).status_code == 200
