"""The queue as people see it: page by page to its end, and where one job stands."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ratchet_service.database import Database, utc_now
from ratchet_service.queue_rows import UNMADE
from ratchet_service.usecases import queue as shown
from tests.support.api import Api
from tests.support.queue import Queue


@pytest.fixture
def queue(tmp_path: Path, database: Database) -> Queue:
    return Queue(tmp_path, database, cpus=1)


def test_all_pages_have_every_job_once_beyond_what_a_round_looks_at(queue: Queue, api: Api) -> None:
    ids = [queue.submit() for _ in range(130)]
    first = api.client.get("/v1/queue?limit=100").json()
    second = api.client.get("/v1/queue", params={"limit": 100, "cursor": first["next_cursor"]}).json()
    items = [*first["items"], *second["items"]]
    assert [one["job_id"] for one in items] == ids and [one["position"] for one in items] == list(range(1, 131))
    assert (first["waiting"], second["waiting"], second["next_cursor"]) == (130, 130, None)
    answer = api.client.get("/v1/queue?cursor=abc")
    assert (answer.status_code, answer.json()["code"]) == (400, "bad-cursor")
    (far,) = api.client.get("/v1/queue", params={"job_id": ids[119]}).json()["items"]
    assert (far["position"], far["job_id"]) == (120, ids[119])


def placed(api: Api, job_id: str) -> int | None:
    (one,) = api.client.get("/v1/queue", params={"job_id": job_id}).json()["items"]
    position: int | None = one["position"]
    return position


def test_nobody_is_told_a_position_behind_the_deepest(queue: Queue, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each owner no more are looked at: behind it positions would be wrong."""
    monkeypatch.setattr(shown, "DEEPEST", 3)
    ids = [queue.submit(owner=owner) for owner in ("ada", "bob") for _ in range(3)]
    listed = api.client.get("/v1/queue").json()
    assert (len(listed["items"]), listed["waiting"], listed["next_cursor"]) == (3, 6, None)
    first = {one["job_id"]: one["position"] for one in listed["items"]}
    assert {job: placed(api, job) for job in ids} == {job: first.get(job) for job in ids}


def test_a_job_whose_attempt_cannot_be_made_is_shown_behind_the_others(queue: Queue, api: Api) -> None:
    """As the reconciler goes through them."""
    ids = [queue.submit() for _ in range(3)]
    queue.put(ids[0], reason=UNMADE, message="its directory cannot be read")
    items = api.client.get("/v1/queue").json()["items"]
    assert [one["job_id"] for one in items] == [*ids[1:], ids[0]]
    assert [placed(api, job) for job in ids] == [3, 1, 2]


def test_one_job_is_told_where_it_stands_and_what_it_waits_for(queue: Queue, api: Api) -> None:
    runs, waits, later = queue.submit(), queue.submit(), queue.submit()
    assert queue.round() == [runs]
    queue.put(later, not_before=utc_now() + timedelta(minutes=5), reason="backoff", message="Tried again after 300 s.")

    def asked(job_id: str) -> list[tuple[int | None, str | None]]:
        answer = api.client.get("/v1/queue", params={"job_id": job_id}).json()
        assert answer["waiting"] == 1
        return [(one["position"], one["reason"]) for one in answer["items"]]

    assert (asked(runs), asked(waits), asked(later)) == ([], [(1, "no-slot")], [(None, "backoff")])
    answer = api.client.get("/v1/queue?job_id=job-000000000000")
    assert (answer.status_code, answer.json()["code"]) == (404, "job-not-found")
