"""Who may do what: every route declares it, and nobody gets past it, on both databases."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from sqlalchemy.exc import OperationalError

from ratchet_contract.api.roles import SCOPES, Role, Scope
from ratchet_contract.phases import AttemptPhase, JobPhase
from ratchet_service.api.authentication import Agents, Needs, Open, guard_of
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from ratchet_service.db.api_tokens import hash_token
from ratchet_service.db.engine import Database
from ratchet_service.db.models import ApiToken, Job
from tests.support.api import TOKEN, Api, FakeSubmission, Server, spec
from tests.support.team import Team, problem_status_and_code, team, token_required_service
from tests.support.tokens import bearer, make_token

__all__ = ["team", "token_required_service"]
OPEN = ("/healthz", "/readyz", "/", "/docs", "/docs/{name}", "/web/{name}")
ACTIONS = ("suspend", "cancel", "preempt", "checkpoint", "resume", "fork")


def routes() -> list[APIRoute]:
    app = create_app(Settings(home=Path("/nowhere")), FakeSubmission())
    return [route for route in app.state.routes if isinstance(route, APIRoute)]


def filled(path: str) -> str:
    values = {
        "job_id": "job-000000000000",
        "number": "1",
        "digest": "0" * 64,
        "checkpoint_id": "step-000000000001.a0001",
    }
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], "x"), path)


def test_every_route_declares_its_required_access() -> None:
    for route in routes():
        guard = guard_of(route.dependant)
        assert guard is not None, f"{route.methods} {route.path} lets anybody in: say needs(...), AGENTS or OPEN"
        assert isinstance(guard, Open) == (route.path in OPEN), route.path
        assert isinstance(guard, Agents) == ("/attempts/{number}/" in route.path), route.path
        if isinstance(guard, Needs) and not (route.methods or set()) <= {"GET"}:
            writes = guard.scope is not None and guard.scope.value.endswith(":write")
            assert writes, f"{route.methods} {route.path} changes something with a scope for reading"
            assert guard.own_job == ("{job_id}" in route.path), f"{route.path}: whose job?"


def test_guarded_routes_without_a_token_answer_401_before_validation(team: Team) -> None:
    for route in routes():
        if isinstance(guard_of(route.dependant), Open):
            continue
        for method in route.methods or ():
            answer = team.nobody.request(method, filled(route.path), content=b"{")
            assert problem_status_and_code(answer)[0] == 401, f"{method} {route.path}: {answer.text}"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert team.nobody.get("/healthz").status_code == team.nobody.get("/readyz").status_code == 200


def test_a_viewer_reads_everything_and_changes_nothing(team: Team) -> None:
    job_id = team.api(team.ann).submit()
    team.api(team.ann).set_phase(job_id, JobPhase.SUCCEEDED)
    for route in routes():
        guard = guard_of(route.dependant)
        if not isinstance(guard, Needs):
            continue
        path = filled(route.path).replace("job-000000000000", job_id)
        for method in route.methods or ():
            answer = team.eve.request(method, path)
            allowed = guard.scope is None or guard.scope in SCOPES[Role.VIEWER]
            assert (answer.status_code == 403) != allowed, f"{method} {path}: {answer.status_code} {answer.text}"
            if not allowed:
                assert problem_status_and_code(answer) == (403, "not-allowed") and "viewer" in answer.json()["detail"]
    assert team.eve.get(f"/v1/jobs/{job_id}").json()["phase"] == "SUCCEEDED"


def test_submitter_may_change_own_jobs_only_and_admin_all(team: Team) -> None:
    job_id = team.api(team.ann).submit()
    assert team.bob.get(f"/v1/jobs/{job_id}").json()["owner"] == "ann"
    calls: list[tuple[str, str, Any]] = [("POST", f"/v1/jobs/{job_id}/{action}", {}) for action in ACTIONS]
    calls += [("PATCH", f"/v1/jobs/{job_id}", {"priority": 3}), ("DELETE", f"/v1/jobs/{job_id}", None)]
    calls += [("POST", f"/v1/jobs/{job_id}/checkpoints/prune", {})]
    for method, path, body in calls:
        answer = team.bob.request(method, path, json=body)
        assert problem_status_and_code(answer) == (403, "not-allowed"), f"{method} {path}: {answer.text}"
        assert "belongs to ann" in answer.json()["detail"]
    before = team.ann.get(f"/v1/jobs/{job_id}").json()
    assert (before["phase"], before["priority"]) == ("QUEUED", 0)
    assert team.ann.patch(f"/v1/jobs/{job_id}", json={"priority": 3}).json()["priority"] == 3
    assert team.root.post(f"/v1/jobs/{job_id}/cancel").json()["phase"] == "CANCELLED"
    assert team.bob.post("/v1/jobs/job-000000000000/cancel").status_code == 404


def test_jobs_are_listed_by_owner_and_cursors_are_bound_to_their_filter(team: Team) -> None:
    mine = [team.api(team.ann).submit() for _ in range(3)]
    other = team.api(team.bob).submit()
    first = team.eve.get("/v1/jobs", params={"owner": "ann", "limit": 2}).json()
    rest = team.eve.get("/v1/jobs", params={"owner": "ann", "limit": 2, "cursor": first["next_cursor"]}).json()
    assert sorted(job["id"] for job in first["items"] + rest["items"]) == sorted(mine)
    assert [job["id"] for job in team.eve.get("/v1/jobs", params={"owner": "bob"}).json()["items"]] == [other]
    wrong = team.eve.get("/v1/jobs", params={"owner": "bob", "limit": 2, "cursor": first["next_cursor"]})
    assert problem_status_and_code(wrong) == (400, "bad-cursor")


def test_idempotency_key_is_shared_by_all_tokens_of_one_owner(team: Team) -> None:
    key = {"Idempotency-Key": "same"}
    again = team.member("ann", Role.SUBMITTER)
    first = team.ann.post("/v1/jobs", json=spec(), headers=key).json()["id"]
    assert again.post("/v1/jobs", json=spec(), headers=key).json()["id"] == first
    assert team.bob.post("/v1/jobs", json=spec(), headers=key).json()["id"] != first


def test_unknown_expired_and_revoked_tokens_get_distinct_error_codes(team: Team) -> None:
    past = team.database.clock.now() - timedelta(seconds=1)
    good = make_token(team.database, "ann", Role.SUBMITTER)
    changed = good[:-1] + ("a" if good[-1] != "a" else "b")
    revoked = make_token(team.database, "ann", Role.SUBMITTER)
    with team.database.write() as session:
        session.get_one(ApiToken, revoked.split("_")[1]).revoked_at = past
    expected = {
        changed: "token-unknown",
        "rt_aaaaaaaa_" + "x" * 32: "token-unknown",
        "nonsense": "token-unknown",
        TOKEN: "token-unknown",
        make_token(team.database, "ann", Role.SUBMITTER, expires=past): "token-expired",
        revoked: "token-revoked",
    }
    for text, code in expected.items():
        answer = team.nobody.get("/v1/jobs", headers=bearer(text))
        assert problem_status_and_code(answer) == (401, code)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert len(text) < 12 or text not in answer.text
    basic = team.nobody.get("/v1/jobs", headers={"Authorization": "Basic YTpi"})
    assert problem_status_and_code(basic) == (401, "token-missing")
    assert team.nobody.get("/v1/jobs", headers=bearer(good)).status_code == 200
    with team.database.read() as session:
        row = session.get_one(ApiToken, good.split("_")[1])
        assert row.token_hash == hash_token(good) and good not in str(vars(row))


def test_refusal_for_a_missing_scope_names_the_scope(team: Team) -> None:
    reader = team.member("ann", Role.SUBMITTER, Scope.JOBS_READ)
    assert reader.get("/v1/jobs").status_code == 200
    answer = reader.post("/v1/jobs", json=spec())
    assert problem_status_and_code(answer) == (403, "not-allowed") and "jobs:write" in answer.json()["detail"]
    assert problem_status_and_code(reader.get("/metrics"))[0] == 403
    scraper = team.member("prometheus", Role.VIEWER, Scope.METRICS_READ)
    assert scraper.get("/metrics").status_code == 200
    assert problem_status_and_code(scraper.get("/v1/jobs"))[0] == 403


def test_token_last_used_at_is_written_at_most_once_per_minute(team: Team) -> None:
    text = make_token(team.database, "ann", Role.SUBMITTER)

    def used() -> Any:
        with team.database.read() as session:
            return session.get_one(ApiToken, text.split("_")[1]).last_used_at

    assert used() is None
    team.nobody.get("/v1/whoami", headers=bearer(text))
    first = used()
    assert first is not None
    team.nobody.get("/v1/whoami", headers=bearer(text))
    assert used() == first
    with team.database.write() as session:
        session.get_one(ApiToken, text.split("_")[1]).last_used_at = first - timedelta(seconds=61)
    team.nobody.get("/v1/whoami", headers=bearer(text))
    assert used() >= first


def test_read_requests_succeed_when_token_use_cannot_be_written(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, or a server that takes no writes for now."""
    text = make_token(team.database, "ann", Role.SUBMITTER)

    def refuse(*_: object) -> Any:
        raise OperationalError("UPDATE", {}, Exception("database or disk is full"))

    monkeypatch.setattr(Database, "write", refuse)
    assert team.nobody.get("/v1/jobs", headers=bearer(text)).status_code == 200
    assert problem_status_and_code(team.nobody.post("/v1/jobs", json=spec(), headers=bearer(text)))[0] in (503, 507)


def test_whoami_returns_owner_role_and_scopes_of_the_token(team: Team, api: Api) -> None:
    found = team.ann.get("/v1/whoami").json()
    assert (found["owner"], found["role"], found["tokens_required"]) == ("ann", "submitter", True)
    assert found["scopes"] == sorted(SCOPES[Role.SUBMITTER])
    local = api.client.get("/v1/whoami").json()
    assert (local["owner"], local["role"], local["token"], local["tokens_required"]) == ("local", "admin", None, False)


def test_token_sent_to_a_service_without_tokens_is_still_checked(api: Api) -> None:
    assert problem_status_and_code(api.client.get("/v1/jobs", headers=bearer("rt_aaaaaaaa_" + "x" * 32))) == (
        401,
        "token-unknown",
    )
    viewer = make_token(api.database, "eve", Role.VIEWER)
    assert problem_status_and_code(api.client.post("/v1/jobs", json=spec(), headers=bearer(viewer))) == (
        403,
        "not-allowed",
    )
    mine = api.client.post("/v1/jobs", json=spec(), headers=bearer(make_token(api.database, "ann", Role.SUBMITTER)))
    assert mine.json()["owner"] == "ann"
    assert api.job(api.submit())["owner"] == "local"


def test_attempt_token_only_allows_reports_of_its_own_running_attempt(team: Team) -> None:
    api = team.api(team.ann)
    job_id, other = api.submit(), api.submit()
    api.attempt(job_id)
    api.attempt(other, report_token_hash=hash_token("another"))
    agent = team.api(team.nobody)
    assert agent.report(job_id).status_code == 200
    assert problem_status_and_code(agent.report(other)) == (403, "token-wrong")
    assert problem_status_and_code(team.nobody.get(f"/v1/jobs/{job_id}", headers=bearer(TOKEN))) == (
        401,
        "token-unknown",
    )
    ann = make_token(team.database, "ann", Role.SUBMITTER)
    assert problem_status_and_code(agent.report(job_id, token=ann)) == (403, "token-wrong")
    with team.database.write() as session:
        from ratchet_service.db.models import Attempt

        session.get_one(Attempt, (job_id, 1)).phase = AttemptPhase.ENDED
    assert problem_status_and_code(agent.report(job_id)) == (409, "stale-attempt")


def test_rate_limit_answers_429_with_retry_after_per_caller(api: Api, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, tokens_required=True, request_rate=0.01, request_burst=3, refused_rate=0.01,
                        refused_burst=2, report_rate=0.01, report_burst=2)  # fmt: skip
    job_id = api.submit()
    api.attempt(job_id)
    ann, bob = (bearer(make_token(api.database, name, Role.VIEWER)) for name in ("ann", "bob"))
    with Server(create_app(settings, FakeSubmission(), api.database)) as url, httpx.Client(base_url=url) as client:
        assert [client.get("/v1/jobs", headers=ann).status_code for _ in range(3)] == [200] * 3
        answer = client.get("/v1/jobs", headers=ann)
        assert problem_status_and_code(answer) == (429, "too-many-requests")
        assert 1 <= int(answer.headers["retry-after"]) <= 100
        another = bearer(make_token(api.database, "ann", Role.SUBMITTER))
        assert client.get("/v1/jobs", headers=another).status_code == 429  # more tokens are not more requests
        assert client.get("/v1/jobs", headers=bob).status_code == 200
        assert [client.get("/v1/jobs").status_code for _ in range(3)] == [401, 401, 429]
        assert client.get("/v1/jobs", headers=bob).status_code == 200
        agent = Api(client, api.database, settings, FakeSubmission())
        assert [agent.report(job_id).status_code for _ in range(3)] == [200, 200, 429]
        code = f"/v1/jobs/{job_id}/attempts/01/code/{'0' * 64}"  # 01 is the same attempt
        assert problem_status_and_code(client.get(code, headers=bearer(TOKEN))) == (429, "too-many-requests")
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("path", ["/v1/jobs", f"/v1/jobs/{{}}/attempts/1/code/{'0' * 64}"])
def test_malformed_authorization_header_counts_as_a_refusal(api: Api, tmp_path: Path, path: str) -> None:
    settings = Settings(home=tmp_path, tokens_required=True, refused_rate=0.01, refused_burst=2)
    job_id = api.submit()
    api.attempt(job_id)
    with Server(create_app(settings, FakeSubmission(), api.database)) as url, httpx.Client(base_url=url) as client:
        headers = {"Authorization": "Basic YTpi"}
        answers = [client.get(path.format(job_id), headers=headers).status_code for _ in range(3)]
        assert answers == [401, 401, 429]


def test_report_rate_limit_is_separate_for_each_node_of_a_job(api: Api, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, report_rate=0.01, report_burst=3)
    job_id = api.submit()
    with api.database.write() as session:
        job = session.get_one(Job, job_id)
        job.spec = job.spec | {"world": job.spec["world"] | {"nodes": 2}}
    api.attempt(job_id)
    with Server(create_app(settings, FakeSubmission(), api.database)) as url, httpx.Client(base_url=url) as client:
        agents = Api(client, api.database, settings, FakeSubmission())
        assert [agents.report(job_id, node=0).status_code for _ in range(4)] == [200, 200, 200, 429]
        assert [agents.report(job_id, node=1).status_code for _ in range(2)] == [200, 200]
        assert problem_status_and_code(agents.report(job_id, node=0)) == (
            429,
            "too-many-requests",
        )  # all of them: more than two nodes may


@pytest.mark.parametrize("role", list(Role))
def test_role_includes_the_scopes_of_lower_roles(role: Role) -> None:
    for lower in Role:
        assert role.includes(lower) == (SCOPES[role] >= SCOPES[lower])
