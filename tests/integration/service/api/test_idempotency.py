"""Idempotency-Key, and that nothing is answered before it is committed."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ratchet_contract.api.roles import Role
from ratchet_contract.phases import JobPhase
from ratchet_contract.processes.procfs import start_time
from ratchet_service.api.idempotency import make_call
from ratchet_service.db.engine import utc_now
from ratchet_service.db.models import IdempotencyKey, Job
from ratchet_service.db.principal import LOCAL
from tests.support.api import Api, spec
from tests.support.tokens import make_token


def key(value: str = "k1", **headers: str) -> dict[str, str]:
    return {"Idempotency-Key": value} | headers


def count(api: Api) -> int:
    with api.database.read() as session:
        return session.scalar(sa.select(sa.func.count()).select_from(Job)) or 0


def post(api: Api, body: Any, headers: dict[str, str], path: str = "/v1/jobs") -> httpx.Response:
    return api.client.post(path, json=body, headers=headers)


def test_repeated_idempotency_key_replays_the_answer_and_creates_one_job(api: Api) -> None:
    first = post(api, spec(), key())
    again = post(api, dict(reversed(spec().items())), key())  # another order of keys is the same body
    assert first.status_code == again.status_code == 201
    assert again.content == first.content
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    assert count(api) == 1


def test_idempotency_keys_are_scoped_to_caller_and_path(api: Api) -> None:
    a = post(api, spec(), key()).json()["id"]
    other = make_token(api.database, "ann", Role.SUBMITTER)
    assert post(api, spec(), key(Authorization=f"Bearer {other}")).json()["id"] != a
    assert post(api, spec(), key("k2")).json()["id"] != a
    assert post(api, {}, key(), f"/v1/jobs/{a}/suspend").status_code == 200
    assert count(api) == 3


def test_idempotency_key_reused_with_other_body_or_query_is_refused(api: Api) -> None:
    post(api, spec(), key())
    for answer in (
        post(api, spec(name="other"), key()),
        api.client.post("/v1/jobs", params={"dry_run": "true"}, json=spec(), headers=key()),
    ):
        assert (answer.status_code, answer.json()["code"]) == (422, "idempotency-key-reused")
    assert count(api) == 1


def test_client_errors_are_replayed_for_the_same_idempotency_key(api: Api) -> None:
    job_id = api.submit()
    path = f"/v1/jobs/{job_id}/preempt"
    first = post(api, {}, key(), path)
    assert (first.status_code, first.json()["code"]) == (409, "not-running")
    api.set_phase(job_id, JobPhase.RUNNING)  # now it would be possible
    again = post(api, {}, key(), path)
    assert again.content == first.content
    assert again.headers["content-type"] == "application/problem+json"
    assert again.headers["idempotency-replayed"] == "true"
    assert post(api, {}, key("k2"), path).status_code == 202


@pytest.mark.parametrize("bad", ["", "x" * 256, "a\tb", "é"])
def test_invalid_idempotency_keys_are_refused(api: Api, bad: str) -> None:
    headers = [(b"Idempotency-Key", bad.encode("latin-1"))]
    answer = api.client.post("/v1/jobs", json=spec(), headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid-idempotency-key")
    assert count(api) == 0


def test_concurrent_requests_with_one_idempotency_key_create_one_job(api: Api) -> None:
    start = threading.Barrier(12)
    answers: list[httpx.Response] = []

    def submit() -> None:
        start.wait(20)
        answers.append(post(api, spec(), key()))

    threads = [threading.Thread(target=submit) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    created = [a for a in answers if a.status_code == 201]
    others = [a for a in answers if a.status_code != 201]
    assert len(answers) == 12
    assert created
    assert len({a.content for a in created}) == 1
    assert all((a.status_code, a.json()["code"]) == (409, "idempotency-in-progress") for a in others)
    assert all(a.headers["retry-after"] == "1" for a in others)
    assert count(api) == 1


def test_second_request_during_the_first_answers_idempotency_in_progress(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go = threading.Event(), threading.Event()
    original = api.submission.resolve

    def slow(*given: Any) -> Any:
        inside.set()
        assert go.wait(30)
        return original(*given)

    monkeypatch.setattr(api.submission, "resolve", slow)
    answers: list[httpx.Response] = []
    first = threading.Thread(target=lambda: answers.append(post(api, spec(), key())))
    first.start()
    assert inside.wait(30)
    second = post(api, spec(), key())
    assert (second.status_code, second.json()["code"]) == (409, "idempotency-in-progress")
    assert post(api, spec(name="other"), key()).json()["code"] == "idempotency-key-reused"
    go.set()
    first.join(30)
    assert answers[0].status_code == 201
    assert post(api, spec(), key()).content == answers[0].content


def age(api: Api, seconds: float) -> None:
    with api.database.write() as session:
        session.execute(sa.update(IdempotencyKey).values(created_at=utc_now() - timedelta(seconds=seconds)))


def test_idempotency_claim_of_a_dead_process_is_taken_over(api: Api) -> None:
    host, headers = socket.gethostname()[:80], {"Idempotency-Key": "k"}
    with api.database.write() as session:  # a request of a process that is not there any more, killed before its answer
        call = make_call("k", LOCAL, "POST", "/v1/jobs", [], spec())
        row = IdempotencyKey(scope=call.scope, key="k", body_hash=call.body_hash, token="t", created_at=utc_now())
        row.headers = {"claimed-by": f"{host}/{os.getpid()}/{start_time(os.getpid())}"}
        session.add(row)
    assert api.client.post("/v1/jobs", json=spec(), headers=headers).json()["code"] == "idempotency-in-progress"
    with api.database.write() as session:
        session.get_one(IdempotencyKey, (call.scope, "k")).headers = {"claimed-by": f"{host}/{2**22 + 1}/1"}
    assert api.client.post("/v1/jobs", json=spec(), headers=headers).status_code == 201


def test_idempotency_key_expires_after_a_day(api: Api) -> None:
    first = post(api, spec(), key()).json()["id"]
    age(api, 23 * 3600)
    assert post(api, spec(), key()).json()["id"] == first
    age(api, 25 * 3600)
    assert post(api, spec(), key()).json()["id"] != first


@pytest.mark.parametrize("off", [1.0, -3600.0], ids=["old", "set back"])
def test_request_with_a_lost_idempotency_claim_has_no_effect(
    api: Api, monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    """A first request hangs longer than any should, or the clock was ahead when it came; the second takes its claim over; then
    the first wakes up."""
    inside, go = threading.Event(), threading.Event()
    original = api.submission.resolve
    calls = []

    def slow_once(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            inside.set()
            assert go.wait(30)
        return original(*given)

    monkeypatch.setattr(api.submission, "resolve", slow_once)
    answers: list[httpx.Response] = []
    first = threading.Thread(target=lambda: answers.append(post(api, spec(), key())))
    first.start()
    assert inside.wait(30)
    age(api, api.settings.claim_seconds + off)
    second = post(api, spec(), key())
    go.set()
    first.join(30)
    assert second.status_code == 201
    assert (answers[0].status_code, answers[0].json()["code"]) == (409, "idempotency-claim-lost")
    assert count(api) == 1
    assert post(api, spec(), key()).content == second.content


class FailingCommit:
    """Makes the commits of transactions that inserted a job fail."""

    def __init__(self, api: Api) -> None:
        self.engine = api.database.engine
        self.hits = 0

    def __enter__(self) -> FailingCommit:
        sa.event.listen(self.engine, "before_cursor_execute", self._see)
        sa.event.listen(self.engine, "commit", self._fail)
        return self

    def __exit__(self, *_: object) -> None:
        sa.event.remove(self.engine, "before_cursor_execute", self._see)
        sa.event.remove(self.engine, "commit", self._fail)

    def _see(self, connection: Connection, _c: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO events"):
            connection.info["doomed"] = True

    def _fail(self, connection: Connection) -> None:
        if connection.info.pop("doomed", False):
            self.hits += 1
            raise RuntimeError("the disk is full")


@pytest.mark.parametrize("headers", [{}, key()], ids=["plain", "with-key"])
def test_submit_with_a_failing_commit_answers_500_and_leaves_nothing(api: Api, headers: dict[str, str]) -> None:
    with FailingCommit(api) as failing:
        answer = post(api, spec(), headers)
    assert failing.hits == 1
    assert (answer.status_code, answer.json()["code"]) == (500, "internal-error")
    assert answer.headers["content-type"] == "application/problem+json"
    assert "disk is full" not in answer.text
    assert count(api) == 0
    retried = post(api, spec(), headers)  # errors of the server are not kept
    assert retried.status_code == 201
    assert count(api) == 1


def test_submit_whose_commit_is_answered_by_a_lost_connection_creates_one_job(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has committed, but the service does not learn it."""
    dialect = api.database.engine.dialect
    commit, lost = dialect.do_commit, []

    def commit_and_lose(connection: Any) -> None:
        commit(connection)
        if not lost:
            lost.append(1)  # ``count`` reads in a transaction, whose commit comes here, too
            if count(api) == 1:
                raise ConnectionResetError("server closed the connection")
            lost.clear()

    monkeypatch.setattr(dialect, "do_commit", commit_and_lose)
    assert post(api, spec(), key()).status_code == 500
    repeated = post(api, spec(), key())
    assert lost and (repeated.status_code, repeated.headers["idempotency-replayed"]) == (201, "true")
    assert count(api) == 1


def test_an_action_whose_commit_fails_changes_nothing(api: Api) -> None:
    job_id = api.submit()
    with FailingCommit(api):
        answer = api.client.post(f"/v1/jobs/{job_id}/suspend")
    assert answer.status_code == 500
    assert api.job(job_id)["phase"] == "QUEUED"


def test_submitted_job_is_visible_to_other_connections_when_answered(api: Api) -> None:
    """Committed before it is answered: another connection finds every job the moment its 201 arrives."""
    for _ in range(20):
        job_id = api.submit()
        with api.database.read() as session:
            assert session.get(Job, job_id) is not None
