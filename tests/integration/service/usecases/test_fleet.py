"""What all jobs together do: every figure right, at a fixed number of statements, with the limit of rows reported."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ratchet_contract.phases import AttemptPhase, Cause, JobPhase
from ratchet_service.db.engine import utc_now
from ratchet_service.db.models import Attempt, AttemptNode, Checkpoint, Job
from ratchet_service.usecases import fleet as usecase
from tests.support.api import TOKEN, Api
from tests.support.statements import recorded_queries

REPORT = {"verdict": "exact", "base": {"step": 5, "attempt": 1, "digest": "d"}, "world_size": 1}
REDONE = {"world_size": 1, "steps": 3, "reason": None, "ranks": {"0": [3, 3]}, "first_difference": None}
DIFFERENCE = {"step": 6, "rank": 0, "part": "parameters"}


def read(api: Api, **query: Any) -> dict[str, Any]:
    answer = api.client.get("/v1/fleet", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def end(
    api: Api,
    job_id: str,
    number: int,
    cause: Cause,
    hosts: tuple[str, ...] = ("h1",),
    hours: float = 1.0,
    **columns: Any,
) -> None:
    """An attempt of one hour that ended ``hours`` ago: 10 minutes each of queue and launch, then training."""
    over = utc_now() - timedelta(hours=hours)
    begin = over - timedelta(hours=1)
    times = {
        "created_at": begin,
        "begun_at": begin + timedelta(minutes=10),
        "training_at": begin + timedelta(minutes=20),
        "ended_at": over,
    }
    with api.database.write() as session:
        facts = {"job_id": job_id, "number": number, "phase": AttemptPhase.ENDED, "report_token_hash": TOKEN}
        session.add(Attempt(**(facts | times | {"cause": cause, "outcome": cause.outcome} | columns)))
        session.flush()
        for node, host in enumerate(hosts):
            session.add(AttemptNode(job_id=job_id, attempt=number, node=node, host=host, phase=AttemptPhase.ENDED))


def own(api: Api, job_id: str, owner: str, device: str = "cpu") -> str:
    with api.database.write() as session:
        job = session.get_one(Job, job_id)
        job.owner, job.resolved = owner, job.resolved | {"device": device}
    return job_id


def test_empty_fleet_has_capacity_and_no_figures(api: Api) -> None:
    found = read(api)
    assert found["slots"] == [
        {"kind": "cpu", "capacity": 4, "holders": []},
        {"kind": "gpu", "capacity": 0, "holders": []},
    ]
    assert found["goodput"]["goodput"] is None and found["goodput"]["wall_seconds"] == 0
    empty: tuple[tuple[str, Any], ...] = (("jobs", {}), ("ends", {}), ("hosts", []), ("owners", []), ("resumes", {}))
    assert all(found[key] == value for key, value in empty) and found["attempts"] == found["attempts_left_out"] == 0
    for days in (0, 91):
        assert api.client.get("/v1/fleet", params={"days": days}).status_code == 422


def test_fleet_shows_jobs_by_phase_slots_and_use_by_owner(api: Api) -> None:
    running, done = own(api, api.submit(name="runs"), "ann"), own(api, api.submit(name="done"), "bob", "cuda")
    api.submit(name="waits")
    api.attempt(running, begun_at=utc_now() - timedelta(hours=2), created_at=utc_now() - timedelta(hours=2))
    with api.database.write() as session:
        session.get_one(AttemptNode, (running, 1, 0)).gpus = [3]
    end(api, done, 1, Cause.COMPLETED)
    api.set_phase(done, JobPhase.SUCCEEDED)
    found = read(api)
    assert found["jobs"] == {"QUEUED": 1, "STARTING": 1, "SUCCEEDED": 1}
    holder = {"job_id": running, "name": "runs", "owner": "ann"}
    assert [slots["holders"] for slots in found["slots"]] == [
        [holder | {"count": 2, "devices": [0, 1]}],
        [holder | {"count": 1, "devices": [3]}],
    ]
    ann, bob = found["owners"]
    assert ann | {"rank_hours": 0} == {
        "owner": "ann", "running": 1, "ranks": 2, "gpus": 0, "gpu_hours": 0.0, "rank_hours": 0
    }  # fmt: skip
    assert ann["rank_hours"] == pytest.approx(4.0, abs=0.1)
    assert (bob["owner"], bob["running"], bob["rank_hours"]) == ("bob", 0, 0.0)
    assert bob["gpu_hours"] == pytest.approx(2 * 50 / 60, abs=0.01)


def test_fleet_counts_ends_in_the_window_by_cause_and_host(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job = api.submit()
    end(api, job, 1, Cause.OOM, ("bad", "fine"))
    end(api, job, 2, Cause.NODE_LOST, ("bad",))
    end(api, job, 3, Cause.SIGTERM, ("busy",))
    end(api, job, 4, Cause.SIGTERM, ("busy",))
    end(api, job, 5, Cause.OOM, ("bad",), hours=24 * 8)
    found = read(api)
    assert found["ends"] == {"oom": 1, "node-lost": 1, "sigterm": 2}
    unblamed: dict[str, Any] = {"faults": {}, "excluded_by": []}
    assert found["hosts"] == [
        {"host": "bad", "failures": 2, "ends": {"oom": 1, "node-lost": 1}, **unblamed},
        {"host": "fine", "failures": 1, "ends": {"oom": 1}, **unblamed},
        {"host": "busy", "failures": 0, "ends": {"sigterm": 2}, **unblamed},
    ]
    assert read(api, days=30)["ends"]["oom"] == 2
    monkeypatch.setattr(usecase, "MAX_HOSTS", 1)
    assert [host["host"] for host in read(api)["hosts"]] == ["bad"]


def test_fleet_sums_goodput_and_resumes_of_the_window(api: Api) -> None:
    job = api.submit()
    end(api, job, 1, Cause.OOM, base_step=0, last_step=100, steps_lost=25, resume_report=REPORT | {"verdict": "fresh"})
    end(api, job, 2, Cause.OOM, base_step=75, last_step=175, steps_lost=0, resume_report=REPORT, redone=REDONE)
    end(api, job, 3, Cause.OOM, resume_report=REPORT, redone=REDONE | {"ranks": {}})
    end(api, job, 4, Cause.OOM, resume_report=REPORT | {"verdict": "not-exact"})
    end(api, job, 5, Cause.OOM, resume_report=REPORT, redone=REDONE | {"first_difference": DIFFERENCE})
    end(api, job, 6, Cause.COMPLETED, base_step=None, resume_report=REPORT | {"verdict": "unmanaged"})
    end(api, job, 7, Cause.OOM, hours=24 * 8)
    with api.database.write() as session:
        facts = {"job_id": job, "digest": "d", "size": 1, "files": 1, "reason": "schedule", "created_at": utc_now()}
        session.add_all(Checkpoint(step=step, attempt=2, stall=60.0, **facts) for step in (100, 150))
    found = read(api)
    assert found["resumes"] == {"exact-proved": 1, "exact": 1, "not-exact": 1, "differs": 1}
    assert (found["attempts"], found["attempts_left_out"]) == (6, 0)
    spent = found["goodput"]
    assert (spent["queued_seconds"], spent["launching_seconds"]) == (6 * 600, 6 * 600)
    assert (spent["stall_seconds"], spent["unseen_seconds"]) == (120, 2400)
    single = [api.client.get(f"/v1/jobs/{job}/attempts/{number}").json()["goodput"] for number in range(1, 7)]
    for key in ("wall_seconds", "useful_seconds", "lost_seconds", "stall_seconds"):
        assert spent[key] == pytest.approx(sum(one[key] for one in single), abs=0.01), key
    assert spent["goodput"] == pytest.approx(spent["useful_seconds"] / (spent["wall_seconds"] - 2400), abs=0.001)


def test_fleet_reads_only_the_newest_attempts_and_reports_the_others(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usecase, "MAX_ATTEMPTS", 2)
    job = api.submit()
    for number in range(1, 6):
        end(api, job, number, Cause.OOM, hours=10 - number, resume_report=REPORT if number > 3 else None)
    api.attempt(job, 6)
    found = read(api)
    assert (found["attempts"], found["attempts_left_out"], found["ends"]) == (3, 3, {"oom": 5})
    assert found["resumes"] == {"exact": 2}


def test_statements_of_the_fleet_do_not_grow_with_jobs_and_attempts(api: Api) -> None:
    def fill(number: int) -> int:
        for _ in range(number):
            job = api.submit()
            end(api, job, 1, Cause.OOM)
            api.attempt(job, 2)
        with recorded_queries(api.database) as seen:
            read(api)
        return len(seen)

    assert fill(1) == fill(10)
