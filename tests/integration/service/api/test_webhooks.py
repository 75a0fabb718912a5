"""Webhooks over the API: an admin's alone, with a secret that is shown once."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet_contract.api.roles import Role, Scope
from ratchet_contract.api.webhooks import DEFAULT_TYPES
from ratchet_service.usecases import webhooks
from tests.support.team import Team, problem_status_and_code, team, token_required_service

__all__ = ["team", "token_required_service"]
URL = {"url": "https://hooks.example.org/ratchet"}


def test_created_webhook_shows_its_secret_once(team: Team) -> None:
    key = {"Idempotency-Key": "k"}
    answer = team.root.post("/v1/webhooks", json=URL, headers=key)
    assert answer.status_code == 201 and answer.headers["cache-control"] == "no-store"
    made = answer.json()
    assert answer.headers["location"] == f"/v1/webhooks/{made['id']}"
    assert made["secret"].startswith("whsec_") and made["created_by"] == "root" and made["enabled"]
    assert made["types"] == list(DEFAULT_TYPES)
    again = team.root.post("/v1/webhooks", json=URL, headers=key)
    assert again.headers["idempotency-replayed"] == "true" and again.json() == made | {"secret": None}
    view = {name: value for name, value in made.items() if name != "secret"}
    assert team.root.get(f"/v1/webhooks/{made['id']}").json() == view
    assert team.root.get("/v1/webhooks").json()["items"] == [view]
    rotated = team.root.post(f"/v1/webhooks/{made['id']}/rotate").json()
    assert rotated["secret"].startswith("whsec_") and rotated["secret"] != made["secret"]
    assert rotated["old_secret_until"] is not None


def test_path_of_a_slack_url_is_not_shown(team: Team) -> None:
    url, key = "HTTPS://hooks.slack.test:444/services/T1/secret", {"Idempotency-Key": "k"}
    answers = [team.root.post("/v1/webhooks", json={"url": url, "format": "slack"}, headers=key) for _ in range(2)]
    path = answers[0].headers["location"]
    answers += [team.root.get("/v1/webhooks"), team.root.get(path), team.root.patch(path, json={"types": ["job.*"]})]
    answers += [team.root.patch(path, json={"url": url + "2"}), team.root.get(path)]
    for answer in answers:
        assert "secret" not in answer.text.replace('"secret":null', "").replace("old_secret", "")
        assert "https://hooks.slack.test:444/..." in answer.text


def test_webhook_can_be_changed_disabled_and_deleted(team: Team) -> None:
    made = team.root.post("/v1/webhooks", json=URL | {"owner": "ann", "format": "slack"}).json()
    path = f"/v1/webhooks/{made['id']}"
    changed = team.root.patch(path, json={"types": ["job.*"], "owner": None, "label": "team=vision"}).json()
    assert (changed["types"], changed["owner"], changed["label"], changed["url"]) == (
        ["job.*"],
        None,
        "team=vision",
        "https://hooks.example.org/...",
    )
    off = team.root.patch(path, json={"enabled": False}).json()
    assert not off["enabled"] and off["disabled_reason"] == "disabled by an admin"
    on = team.root.patch(path, json={"enabled": True}).json()
    assert on == changed, "and nothing else changes"
    assert problem_status_and_code(team.root.post(f"{path}/rotate")) == (409, "no-secret")
    assert team.root.get(f"{path}/deliveries").json() == {"items": [], "next_cursor": None}
    assert team.root.delete(path).status_code == 204
    for method, sub in (("GET", ""), ("DELETE", ""), ("GET", "/deliveries"), ("POST", "/test"), ("POST", "/rotate")):
        assert problem_status_and_code(team.root.request(method, path + sub)) == (404, "webhook-not-found")


@pytest.mark.parametrize(
    ("body", "pointer", "words"),
    [
        ({}, "/url", ""),
        ({"url": "ftp://host/"}, "/url", "https://host/path"),
        ({"url": "https:///path"}, "/url", "https://host/path"),
        ({"url": "https://host:99999/"}, "/url", "https://host/path"),
        ({"url": "https://me:secret@host/"}, "/url", "may not hold a user or a password"),
        ({"url": "https://höst/"}, "/url", "in ASCII"),
        (URL | {"types": []}, "/types", ""),
        (URL | {"types": ["job.faild"]}, "/types/0", "did you mean 'job.failed'?"),
        (URL | {"types": ["jobs.*"]}, "/types/0", "no event has the type"),
        (URL | {"label": "team"}, "/label", ""),
        (URL | {"owner": "Ann!"}, "/owner", ""),
        (URL | {"format": "discord"}, "/format", ""),
        (URL | {"secret": "whsec_mine"}, "/secret", ""),
    ],
)
def test_invalid_webhook_is_refused_by_its_field(team: Team, body: dict[str, Any], pointer: str, words: str) -> None:
    answer = team.root.post("/v1/webhooks", json=body)
    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["pointer"] == pointer and words in problem["detail"]


@pytest.mark.parametrize("kind", ["job.failed", "job.note.my-own", "job.note.*", "job.*", "*"])
def test_types_that_events_may_have_are_accepted(team: Team, kind: str) -> None:
    assert team.root.post("/v1/webhooks", json=URL | {"types": [kind]}).json()["types"] == [kind]


def test_only_admins_use_webhooks(team: Team) -> None:
    made = team.root.post("/v1/webhooks", json=URL).json()
    path = f"/v1/webhooks/{made['id']}"
    narrow = team.member("root", Role.ADMIN, Scope.JOBS_READ, Scope.QUOTAS_WRITE)
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/v1/webhooks", URL),
        ("GET", "/v1/webhooks", None),
        ("GET", path, None),
        ("PATCH", path, {"enabled": False}),
        ("DELETE", path, None),
        ("GET", f"{path}/deliveries", None),
        ("POST", f"{path}/test", {}),
        ("POST", f"{path}/rotate", {}),
    ]
    for method, where, body in calls:
        for client in (team.ann, team.eve, narrow):
            answer = client.request(method, where, json=body)
            assert answer.status_code == 403 and made["secret"] not in answer.text, (method, where)
        assert team.nobody.request(method, where, json=body).status_code == 401
    assert team.root.get(path).json()["enabled"]


def test_test_delivery_to_the_own_machine_is_refused(team: Team) -> None:
    made = team.root.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/"}).json()
    result = team.root.post(f"/v1/webhooks/{made['id']}/test").json()
    assert not result["delivered"] and result["answer"] is None
    assert "--webhook-network" in result["error"]


def test_number_of_webhooks_is_limited(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "MAX_WEBHOOKS", 2)
    answers = [team.root.post("/v1/webhooks", json=URL) for _ in range(3)]
    assert [one.status_code for one in answers] == [201, 201, 409]
    assert problem_status_and_code(answers[2])[1] == "too-many-webhooks"
