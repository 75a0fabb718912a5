"""The queue as people see it: page by page to its end, and where one job stands."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_service import queue_line
from ratchet_service.database import Database, utc_now
from ratchet_service.models import Quota
from ratchet_service.queue_rows import UNMADE, Row
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
    (last,) = api.client.get("/v1/queue", params={"job_id": ids[-1]}).json()["items"]
    assert (last["position"], last["ahead_at_least"]) == (None, 3), "more than that are ahead, and nobody counted them"
    monkeypatch.setattr(shown, "NEAR", 4)
    views = [api.client.get(f"/v1/jobs/{job}").json() for job in ids]
    told = [(one["position"], one["ahead_at_least"]) for one in views]
    assert told == [(1, None), (3, None), (None, 4), (2, None), (4, None), (None, 4)]


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


def test_jobs_start_in_the_order_that_is_told(queue: Queue, api: Api) -> None:
    """Priorities, owners that hold something already, quotas, room that was made, a back-off, one that could not be made: those
    that may start do so as they are told, and each is told the same wherever it is asked for."""
    crowded = Queue(queue.paths.home, queue.database, cpus=100)
    for owner in ("ada", "ada", "bob"):
        crowded.submit(owner=owner)
    assert len(crowded.round()) == 3
    for n in range(24):
        owner = ("ada", "bob", "eve", "kim")[n % 7 % 4]
        crowded.submit(owner=owner, ranks=1 + n % 3, priority=(5 if n % 6 == 4 else 0))
    limit(queue.database, "kim", 3)
    everybody = [one["job_id"] for one in api.client.get("/v1/queue?limit=100").json()["items"]]
    claims, late, unmade = everybody[-1], everybody[9], everybody[3]
    queue.put(claims, room_since=utc_now())
    queue.put(late, not_before=utc_now() + timedelta(minutes=5))
    queue.put(unmade, reason=UNMADE)

    items = api.client.get("/v1/queue?limit=100").json()["items"]
    told = [one["job_id"] for one in items]
    assert sorted(told) == sorted(set(everybody) - {late}) and told[-1] == unmade
    assert [placed(api, job) for job in told] == list(range(1, 24)) and placed(api, late) is None
    started: list[str] = []
    while batch := crowded.round():
        started += batch
    assert started == [job for job in told if job in started] and len(started) > 16
    assert {crowded.why(job)[0] for job in set(told) - set(started)} == {"quota"}


def limit(database: Database, owner: str, ranks: int) -> None:
    with database.write() as session:
        session.add(Quota(owner=owner, ranks=ranks, updated_at=utc_now()))


def test_one_owners_jobs_are_counted_however_many_are_ahead(
    queue: Queue, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has jobs of that priority: then the position is exact without a look at those ahead."""
    monkeypatch.setattr(shown, "DEEPEST", 0)
    urgent = [queue.submit(owner=owner, priority=9) for owner in ("ada", "bob", "bob")]
    ids = [queue.submit() for _ in range(8)]
    queue.put(ids[6], room_since=utc_now())
    queue.put(ids[5], room_since=utc_now())
    queue.put(ids[1], reason=UNMADE)
    queue.put(ids[2], not_before=utc_now() + timedelta(minutes=5))
    queue.put(urgent[0], not_before=utc_now() + timedelta(minutes=5))
    queue.put(urgent[1], reason=UNMADE)
    expected = [urgent[2], ids[6], ids[5], ids[0], ids[3], ids[4], ids[7]]
    assert {placed(api, job): job for job in expected[1:]} == dict(enumerate(expected[1:], 2))
    assert [placed(api, job) for job in (ids[2], urgent[0])] == [None, None]


def test_a_job_of_its_own_tells_where_it_stands_and_lists_do_not(queue: Queue, api: Api) -> None:
    runs, *waits = [queue.submit() for _ in range(3)]
    assert queue.round() == [runs]
    views = [api.client.get(f"/v1/jobs/{job}").json() for job in (runs, *waits)]
    assert [one["position"] for one in views] == [None, 1, 2]
    assert {one["position"] for one in api.client.get("/v1/jobs").json()["items"]} == {None}


def test_what_changes_while_the_queue_is_read_is_no_fault_of_the_readers(
    queue: Queue, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL shows every statement what has been committed until then: a job ends and is deleted, another one backs off."""
    gone, stays = queue.submit(), queue.submit()
    walk, count = queue_line.everybody, queue_line._count

    def walked(*of: Any) -> Iterator[Row]:
        for row in walk(*of):
            renamed = row.queued._replace(job="job-000000000000") if row.queued.job == gone else row.queued
            yield row._replace(queued=renamed)

    monkeypatch.setattr(queue_line, "everybody", walked)
    assert [one["job_id"] for one in api.client.get("/v1/queue").json()["items"]] == [stays]

    def counted(session: Session, which: sa.ColumnElement[bool]) -> int:
        return count(session, which) - 2

    monkeypatch.setattr(queue_line, "_count", counted)
    assert placed(api, stays) == 1
