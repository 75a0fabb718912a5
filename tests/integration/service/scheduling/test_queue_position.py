"""The queue as people see it: page by page to its end, and where one job stands."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Quota
from ratchet_service.scheduling import queue_position
from ratchet_service.scheduling.scheduler import CREATION_FAILED, Row
from ratchet_service.usecases import queue as shown
from tests.support.api import Api
from tests.support.queue_harness import Queue

pytestmark = pytest.mark.takes_turns


@pytest.fixture
def queue(tmp_path: Path, database: Database) -> Queue:
    return Queue(tmp_path, database, cpus=1)


def test_queue_pages_list_every_job_once_in_order(queue: Queue, api: Api) -> None:
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


def test_queue_position_is_omitted_beyond_the_maximum_depth(
    queue: Queue, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each owner no more are looked at: behind it positions would be wrong."""
    monkeypatch.setattr(shown, "MAX_POSITION", 3)
    ids = [queue.submit(owner=owner) for owner in ("ada", "bob") for _ in range(3)]
    listed = api.client.get("/v1/queue").json()
    assert (len(listed["items"]), listed["waiting"], listed["next_cursor"]) == (3, 6, None)
    first = {one["job_id"]: one["position"] for one in listed["items"]}
    assert {job: placed(api, job) for job in ids} == {job: first.get(job) for job in ids}
    (last,) = api.client.get("/v1/queue", params={"job_id": ids[-1]}).json()["items"]
    assert (last["position"], last["ahead_at_least"]) == (None, 3), "more than that are ahead, and nobody counted them"
    monkeypatch.setattr(shown, "MAX_SINGLE_JOB_POSITION", 4)
    views = [api.client.get(f"/v1/jobs/{job}").json() for job in ids]
    told = [(one["position"], one["ahead_at_least"]) for one in views]
    assert told == [(1, None), (3, None), (None, 4), (2, None), (4, None), (None, 4)]


def test_queue_lists_jobs_with_failed_attempt_creation_last(queue: Queue, api: Api) -> None:
    """As the reconciler goes through them."""
    ids = [queue.submit() for _ in range(3)]
    queue.set_columns(ids[0], reason=CREATION_FAILED, message="its directory cannot be read")
    items = api.client.get("/v1/queue").json()["items"]
    assert [one["job_id"] for one in items] == [*ids[1:], ids[0]]
    assert [placed(api, job) for job in ids] == [3, 1, 2]


def test_queue_query_for_one_job_returns_position_and_reason(queue: Queue, api: Api) -> None:
    runs, waits, later = queue.submit(), queue.submit(), queue.submit()
    assert queue.run_round() == [runs]
    queue.set_columns(
        later, not_before=utc_now() + timedelta(minutes=5), reason="backoff", message="Tried again after 300 s."
    )

    def asked(job_id: str) -> list[tuple[int | None, str | None]]:
        answer = api.client.get("/v1/queue", params={"job_id": job_id}).json()
        assert answer["waiting"] == 1
        return [(one["position"], one["reason"]) for one in answer["items"]]

    assert (asked(runs), asked(waits), asked(later)) == ([], [(1, "no-slot")], [(None, "backoff")])
    answer = api.client.get("/v1/queue?job_id=job-000000000000")
    assert (answer.status_code, answer.json()["code"]) == (404, "job-not-found")


def test_jobs_start_in_the_order_the_queue_shows(queue: Queue, api: Api) -> None:
    """Priorities, owners that hold something already, quotas, room that was made, a back-off, one that could not be made: those
    that may start do so as they are told, and each is told the same wherever it is asked for."""
    crowded = Queue(queue.paths.home, queue.database, cpus=100)
    for owner in ("ada", "ada", "bob"):
        crowded.submit(owner=owner)
    assert len(crowded.run_round()) == 3
    for n in range(24):
        owner = ("ada", "bob", "eve", "kim")[n % 7 % 4]
        crowded.submit(owner=owner, ranks=1 + n % 3, priority=(5 if n % 6 == 4 else 0))
    limit(queue.database, "kim", 3)
    everybody = [one["job_id"] for one in api.client.get("/v1/queue?limit=100").json()["items"]]
    claims, late, unmade = everybody[-1], everybody[9], everybody[3]
    queue.set_columns(claims, preempting_since=utc_now())
    queue.set_columns(late, not_before=utc_now() + timedelta(minutes=5))
    queue.set_columns(unmade, reason=CREATION_FAILED)

    items = api.client.get("/v1/queue?limit=100").json()["items"]
    told = [one["job_id"] for one in items]
    assert sorted(told) == sorted(set(everybody) - {late}) and told[-1] == unmade
    assert [placed(api, job) for job in told] == list(range(1, 24)) and placed(api, late) is None
    started: list[str] = []
    while batch := crowded.run_round():
        started += batch
    assert started == [job for job in told if job in started] and len(started) > 16
    assert {crowded.reason_and_message(job)[0] for job in set(told) - set(started)} == {"quota"}


def limit(database: Database, owner: str, ranks: int) -> None:
    with database.write() as session:
        session.add(Quota(owner=owner, ranks=ranks, updated_at=utc_now()))


def test_queue_position_of_a_single_owners_priority_is_exact_at_any_depth(
    queue: Queue, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has jobs of that priority: then the position is exact without a look at those ahead."""
    monkeypatch.setattr(shown, "MAX_POSITION", 0)
    urgent = [queue.submit(owner=owner, priority=9) for owner in ("ada", "bob", "bob")]
    ids = [queue.submit() for _ in range(8)]
    queue.set_columns(ids[6], preempting_since=utc_now())
    queue.set_columns(ids[5], preempting_since=utc_now())
    queue.set_columns(ids[1], reason=CREATION_FAILED)
    queue.set_columns(ids[2], not_before=utc_now() + timedelta(minutes=5))
    queue.set_columns(urgent[0], not_before=utc_now() + timedelta(minutes=5))
    queue.set_columns(urgent[1], reason=CREATION_FAILED)
    expected = [urgent[2], ids[6], ids[5], ids[0], ids[3], ids[4], ids[7]]
    assert {placed(api, job): job for job in expected[1:]} == dict(enumerate(expected[1:], 2))
    assert [placed(api, job) for job in (ids[2], urgent[0])] == [None, None]


def test_job_view_shows_the_queue_position_and_lists_omit_positions(queue: Queue, api: Api) -> None:
    runs, *waits = [queue.submit() for _ in range(3)]
    assert queue.run_round() == [runs]
    views = [api.client.get(f"/v1/jobs/{job}").json() for job in (runs, *waits)]
    assert [one["position"] for one in views] == [None, 1, 2]
    assert {one["position"] for one in api.client.get("/v1/jobs").json()["items"]} == {None}


def test_queue_read_tolerates_concurrent_changes(queue: Queue, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL shows every statement what has been committed until then: a job ends and is deleted, another one backs off."""
    gone, stays = queue.submit(), queue.submit()
    walk, count = queue_position.iter_queue, queue_position._count

    def walked(*of: Any) -> Iterator[Row]:
        for row in walk(*of):
            renamed = row.queued._replace(job="job-000000000000") if row.queued.job == gone else row.queued
            yield row._replace(queued=renamed)

    monkeypatch.setattr(queue_position, "iter_queue", walked)
    assert [one["job_id"] for one in api.client.get("/v1/queue").json()["items"]] == [stays]

    def counted(session: Session, which: sa.ColumnElement[bool]) -> int:
        return count(session, which) - 2

    monkeypatch.setattr(queue_position, "_count", counted)
    assert placed(api, stays) == 1
