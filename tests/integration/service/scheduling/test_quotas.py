"""Quotas: refused at the door, held back at the launch, and nobody else's affair."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet_contract.errors import Conflict
from ratchet_contract.phases import Desired, JobPhase
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Job
from tests.support.api import Api, spec
from tests.support.queue_harness import Queue


def put(api: Api, owner: str, **quota: Any) -> dict[str, Any]:
    answer = api.client.put(f"/v1/quotas/{owner}", json=quota)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_quotas_can_be_set_read_and_deleted(api: Api) -> None:
    assert api.client.get("/v1/quotas").json()["items"] == []
    assert api.client.get("/v1/quotas/local").json()["source"] == "none"
    assert put(api, "*", gpus=2)["in_use"] is None
    job_id = api.submit()
    api.attempt(job_id)
    view = put(api, "local", queued=7, ranks=4)
    assert (view["queued"], view["jobs"], view["ranks"], view["gpus"]) == (7, None, 4, None), "the whole of it"
    assert view["in_use"] == {"queued": 1, "jobs": 1, "ranks": 2, "gpus": 0}
    put(api, "zoe", jobs=0)
    assert [item["owner"] for item in api.client.get("/v1/quotas").json()["items"]] == ["*", "local", "zoe"]
    other = api.client.get("/v1/quotas/somebody").json()
    assert (other["source"], other["gpus"]) == ("everybody", 2)
    assert api.client.delete("/v1/quotas/local").status_code == 204
    assert api.client.get("/v1/quotas/local").json()["source"] == "everybody"
    gone = api.client.delete("/v1/quotas/local")
    assert (gone.status_code, gone.json()["code"]) == (404, "quota-not-found")


@pytest.mark.parametrize(
    ("owner", "body", "pointer"),
    [
        ("local", {"jobs": -1}, "/jobs"),
        ("local", {"cpus": 1}, "/cpus"),
        ("local", {"gpus": 2**40}, "/gpus"),
        ("Not%20One", {}, "/path/owner"),
    ],
)
def test_invalid_quota_is_refused_with_its_pointer(api: Api, owner: str, body: Any, pointer: str) -> None:
    answer = api.client.put(f"/v1/quotas/{owner}", json=body)
    assert answer.status_code == 422 and answer.json()["errors"][0]["pointer"] == pointer, answer.text


def test_submit_and_resume_beyond_the_queued_quota_are_refused(api: Api) -> None:
    put(api, "*", queued=2)
    key = {"Idempotency-Key": "the-first"}
    first = api.client.post("/v1/jobs", json=spec(), headers=key)
    assert api.client.post("/v1/jobs", json=spec(), headers=key).json()["id"] == first.json()["id"], "counts once"
    second = api.submit()
    refused = api.client.post("/v1/jobs", json=spec())
    assert (refused.status_code, refused.json()["code"]) == (409, "quota-exceeded")
    assert "jobs of local that have not ended: 2, and its quota (queued) is 2" in refused.json()["detail"]
    api.set_phase(second, JobPhase.FAILED)
    third = api.submit()
    again = api.client.post(f"/v1/jobs/{second}/resume")
    assert (again.status_code, again.json()["code"]) == (409, "quota-exceeded")
    api.set_phase(third, JobPhase.SUSPENDED)
    assert api.client.post(f"/v1/jobs/{third}/resume").status_code == 200, "it is counted already"
    with api.database.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Job)) == 3


def test_quota_refusal_is_not_stored_under_the_idempotency_key(api: Api) -> None:
    put(api, "*", queued=1)
    first, key = api.submit(), {"Idempotency-Key": "again-and-again"}
    refused = api.client.post("/v1/jobs", json=spec(), headers=key)
    assert (refused.status_code, refused.json()["code"]) == (409, "quota-exceeded")
    api.set_phase(first, JobPhase.FAILED)
    accepted = api.client.post("/v1/jobs", json=spec(), headers=key)
    assert accepted.status_code == 201, accepted.text
    repeated = api.client.post("/v1/jobs", json=spec(), headers=key)
    assert (repeated.json()["id"], repeated.headers["Idempotency-Replayed"]) == (accepted.json()["id"], "true")

    put(api, "*", ranks=1)
    large, key = spec(world={"ranks_per_node": 2, "device": "cpu"}), {"Idempotency-Key": "too-large"}
    assert api.client.post("/v1/jobs", json=large, headers=key).status_code == 422
    put(api, "*", ranks=2)
    assert api.client.post("/v1/jobs", json=large, headers=key).status_code == 201


def test_submit_with_more_ranks_than_the_quota_is_refused_with_its_pointer(api: Api) -> None:
    put(api, "local", ranks=3)
    answer = api.client.post("/v1/jobs", json=spec(world={"ranks_per_node": 4, "device": "cpu"}))
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "invalid-spec")
    (error,) = problem["errors"]
    assert (error["pointer"], error["code"]) == ("/world/ranks_per_node", "quota-exceeded")
    assert "takes 4 ranks, the quota of local is 3" in error["detail"]
    job_id = api.submit()
    api.set_phase(job_id, JobPhase.SUSPENDED)
    more = api.client.post(f"/v1/jobs/{job_id}/resume", json={"world": {"ranks_per_node": 4}})
    assert (more.status_code, more.json()["errors"][0]["code"]) == (422, "quota-exceeded")


def test_concurrent_submissions_are_accepted_up_to_the_quota(tmp_path: Path, database: Database, api: Api) -> None:
    queue, limit = Queue(tmp_path, database), 3
    put(api, "*", queued=limit)
    refused: list[str] = []
    together = threading.Barrier(8)

    def submit() -> None:
        together.wait(30)
        try:
            queue.submit()
        except Conflict as error:
            refused.append(error.code)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with database.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Job)) == limit
    assert refused == ["quota-exceeded"] * (8 - limit)


def test_job_over_quota_waits_and_blocks_no_other_owner(tmp_path: Path, database: Database, api: Api) -> None:
    queue = Queue(tmp_path, database, cpus=8)
    put(api, "*", ranks=3)
    first, second, small = queue.submit(ranks=2), queue.submit(ranks=2), queue.submit()
    other = queue.submit(owner="other", ranks=3)
    assert queue.run_round() == [first, other] and queue.run_round() == []
    assert queue.reason_and_message(second) == (
        "quota",
        "waits for its owner's quota: needs 2 ranks, 2 of 3 ranks are held",
    )
    assert (
        queue.reason_and_message(small)[0] == "quota"
        and "2 are reserved for jobs ahead of it" in queue.reason_and_message(small)[1]
    )
    put(api, "local", ranks=4)
    assert queue.run_round() == [second]
    queue.end(first)
    assert queue.run_round() == [small]
    late = queue.submit(4)
    assert queue.run_round() == [] and queue.reason_and_message(late)[0] == "no-slot", "2 of 8 slots are left"
    put(api, "local", jobs=2)
    assert queue.run_round() == [] and queue.reason_and_message(late) == (
        "quota",
        "waits for its owner's quota: needs one more job, 2 of 2 jobs are held",
    )
    queue.end(second)
    queue.end(other)
    assert queue.run_round() == [late] and queue.job(late).reason is None


def test_reduced_quota_stops_no_running_job(tmp_path: Path, database: Database, api: Api) -> None:
    queue = Queue(tmp_path, database, cpus=8)
    running = [queue.submit(), queue.submit()]
    assert queue.run_round() == running
    put(api, "local", jobs=0, ranks=1)
    put(api, "local", jobs=1, ranks=1)
    waits = queue.submit(priority=5)
    assert queue.run_round() == [] == queue.run_round()
    for job_id in running:
        job = queue.job(job_id)
        assert (job.phase, job.desired) == (JobPhase.STARTING, Desired.RUN)
    assert queue.stopping() == set() and queue.reason_and_message(waits)[0] == "quota"
    queue.end(running[0])
    assert queue.run_round() == [], "one job is held, and one is the quota"
    queue.end(running[1])
    assert queue.run_round() == [waits]


def test_job_needing_too_many_gpus_reserves_no_quota(tmp_path: Path, database: Database, api: Api) -> None:
    queue = Queue(tmp_path, database, cpus=8, gpus=1)
    put(api, "*", jobs=1)
    hopeless, other = queue.submit(device="cuda", ranks=2), queue.submit(device="cuda")
    assert queue.run_round() == [other]
    assert "this machine has 1" in queue.reason_and_message(hopeless)[1]


def test_backoff_far_in_the_future_is_ignored(tmp_path: Path, database: Database) -> None:
    queue = Queue(tmp_path, database, cpus=1)
    late = queue.submit()
    queue.set_columns(late, not_before=utc_now() + timedelta(minutes=5))
    assert queue.run_round() == []
    queue.set_columns(late, not_before=utc_now() + timedelta(days=1))
    assert queue.run_round() == [late]


def test_queue_lists_jobs_in_start_order_with_wait_reasons(tmp_path: Path, database: Database, api: Api) -> None:
    queue = Queue(tmp_path, database, cpus=2)
    put(api, "greedy", ranks=1)
    runs = queue.submit(owner="greedy")
    assert queue.run_round() == [runs]
    held, late, urgent = queue.submit(owner="greedy"), queue.submit(2, "b"), queue.submit(2, "a", priority=1)
    later = queue.submit(owner="b")
    queue.set_columns(later, not_before=utc_now() + timedelta(minutes=5))
    assert queue.run_round() == []
    items = api.client.get("/v1/queue").json()["items"]
    assert [(one["position"], one["job_id"], one["reason"]) for one in items] == [
        (1, urgent, "no-slot"),
        (2, late, "no-slot"),
        (3, held, "quota"),
    ]
    assert (items[0]["owner"], items[0]["ranks"], items[0]["gpus"], items[0]["name"]) == ("a", 1, 0, "t")
    assert [one["job_id"] for one in api.client.get("/v1/queue?limit=1").json()["items"]] == [urgent]
