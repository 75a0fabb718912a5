"""Tokens over the API: shown once, never with more rights than their maker's, gone when revoked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from ratchet_contract.api.roles import SCOPES, Role, Scope
from ratchet_contract.api.tokens import TokenRequest
from ratchet_contract.errors import Refused
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Base
from ratchet_service.db.principal import Principal
from ratchet_service.usecases import pagination
from ratchet_service.usecases import tokens as usecases
from tests.support.team import Team, problem_status_and_code, team, token_required_service
from tests.support.tokens import bearer

__all__ = ["team", "token_required_service"]


def everything(database: Database) -> str:
    """All rows of all tables, as text."""
    with database.read() as session:
        return "\n".join(
            str(row) for table in Base.metadata.sorted_tables for row in session.execute(sa.select(table)).all()
        )


def test_created_token_is_shown_once_and_stored_nowhere(team: Team) -> None:
    key = {"Idempotency-Key": "k"}
    answer = team.ann.post("/v1/tokens", json={"name": "laptop"}, headers=key)
    assert answer.status_code == 201 and answer.headers["cache-control"] == "no-store"
    made = answer.json()
    assert (made["owner"], made["role"], made["scopes"], made["created_by"]) == ("ann", "submitter", [], "ann")
    days = datetime.fromisoformat(made["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89.9) < days <= timedelta(days=90)
    assert made["token"].startswith(f"rt_{made['id']}_") and len(made["token"]) == 44
    assert team.nobody.get("/v1/whoami", headers=bearer(made["token"])).json()["token"] == made["id"]
    again = team.ann.post("/v1/tokens", json={"name": "laptop"}, headers=key)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == made | {"token": None}
    assert made["token"] not in everything(team.database)
    for path in ("/v1/tokens", f"/v1/tokens/{made['id']}", "/v1/whoami"):
        assert made["token"][12:] not in team.ann.get(path).text


@pytest.mark.parametrize(
    ("who", "body", "pointer"),
    [
        ("ann", {"owner": "bob"}, "/owner"),
        ("ann", {"role": "admin"}, "/role"),
        ("ann", {"role": "viewer", "scopes": ["jobs:write"]}, "/scopes"),
        ("ann", {"scopes": ["quotas:write"]}, "/scopes"),
        ("narrow", {}, "/scopes"),
        ("narrow", {"scopes": ["jobs:read", "jobs:write"]}, "/scopes"),
        ("short", {"expires_days": 90}, "/expires_days"),
        ("short", {"expires_days": None}, "/expires_days"),
    ],
)
def test_token_creation_with_more_rights_than_the_caller_is_refused(
    team: Team, who: str, body: dict[str, Any], pointer: str
) -> None:
    soon = datetime.now(UTC) + timedelta(days=10)
    makers = {
        "ann": team.ann,
        "narrow": team.member("ann", Role.SUBMITTER, Scope.TOKENS_WRITE, Scope.JOBS_READ),
        "short": team.member("ann", Role.SUBMITTER, expires=soon),
    }
    answer = makers[who].post("/v1/tokens", json=body)
    assert problem_status_and_code(answer) == (403, "not-allowed")
    assert answer.json()["errors"][0]["pointer"] == pointer


def test_created_token_has_at_most_the_scopes_and_expiry_of_the_caller(team: Team) -> None:
    narrow = team.member("ann", Role.SUBMITTER, Scope.TOKENS_WRITE, Scope.JOBS_READ)
    made = narrow.post("/v1/tokens", json={"scopes": ["jobs:read"], "expires_days": 1}).json()
    found = team.nobody.get("/v1/whoami", headers=bearer(made["token"])).json()
    assert (found["role"], found["scopes"]) == ("submitter", ["jobs:read"])
    soon = datetime.now(UTC) + timedelta(days=10)
    short = team.member("ann", Role.SUBMITTER, expires=soon).post("/v1/tokens", json={}).json()
    assert datetime.fromisoformat(short["expires_at"]) == soon
    given = team.root.post("/v1/tokens", json={"owner": "carl", "role": "viewer", "expires_days": None}).json()
    assert (given["owner"], given["created_by"], given["expires_at"]) == ("carl", "root", None)
    found = team.nobody.get("/v1/whoami", headers=bearer(given["token"])).json()
    assert found["scopes"] == sorted(SCOPES[Role.VIEWER])


@pytest.mark.parametrize(
    "body",
    [{"owner": "Bad Name"}, {"role": "root"}, {"scopes": ["all"]}, {"expires_days": 0}, {"expires_days": 1e9}, {"name": ""},
     {"expire_days": 1}],
)  # fmt: skip
def test_token_creation_with_an_invalid_body_is_refused_with_its_pointer(team: Team, body: dict[str, Any]) -> None:
    answer = team.root.post("/v1/tokens", json=body)
    assert problem_status_and_code(answer) == (422, "invalid-body")
    assert answer.json()["errors"][0]["pointer"].startswith(f"/{next(iter(body))}")


def test_a_revoked_token_is_refused_at_once_and_stays_on_record(team: Team) -> None:
    made = team.ann.post("/v1/tokens", json={}).json()
    own = bearer(made["token"])
    assert team.nobody.get("/v1/jobs", headers=own).status_code == 200
    path = f"/v1/tokens/{made['id']}"
    assert problem_status_and_code(team.bob.delete(path)) == (404, "token-not-found")
    assert problem_status_and_code(team.bob.get(path)) == (404, "token-not-found")
    gone = team.ann.delete(path).json()
    assert gone["revoked_at"] is not None
    assert problem_status_and_code(team.nobody.get("/v1/jobs", headers=own)) == (401, "token-revoked")
    assert team.root.delete(path).json()["revoked_at"] == gone["revoked_at"]
    shown = [t["id"] for t in team.ann.get("/v1/tokens").json()["items"]]
    every = [t["id"] for t in team.ann.get("/v1/tokens", params={"gone": "true"}).json()["items"]]
    assert made["id"] not in shown and made["id"] in every


def test_revoking_a_token_revokes_all_tokens_created_with_that_token(team: Team) -> None:
    """Children and theirs, of other owners too; not the maker, a sister, or what was made beside the service."""

    def made(client: httpx.Client, **body: Any) -> tuple[dict[str, Any], httpx.Client]:
        answer = client.post("/v1/tokens", json=body).json()
        return answer, team.client(answer["token"])

    stolen, thief = made(team.ann)
    first, again = made(thief)
    second, third = made(again)[1], made(again)[1]
    sister = made(team.ann)[1]
    assert first["made_with"] == stolen["id"] and stolen["made_with"] == team.ann.get("/v1/whoami").json()["token"]
    team.ann.delete(f"/v1/tokens/{second.get('/v1/whoami').json()['token']}")  # gone before: not counted again
    answer = team.ann.delete(f"/v1/tokens/{stolen['id']}").json()
    assert (answer["id"], answer["also_revoked"]) == (stolen["id"], 2)
    for client in (thief, again, second, third):
        assert problem_status_and_code(client.get("/v1/whoami")) == (401, "token-revoked")
    assert sister.get("/v1/whoami").status_code == team.ann.get("/v1/whoami").status_code == 200
    assert team.ann.delete(f"/v1/tokens/{stolen['id']}").json()["also_revoked"] == 0
    for_carl, carl = made(team.root, owner="carl", role="submitter")
    assert team.root.delete(f"/v1/tokens/{for_carl['made_with']}").json()["also_revoked"] == 1
    assert problem_status_and_code(carl.get("/v1/whoami")) == (401, "token-revoked")


def test_token_creation_with_a_concurrently_revoked_token_is_refused(team: Team) -> None:
    token = team.ann.get("/v1/whoami").json()["token"]
    caller = Principal("ann", Role.SUBMITTER, SCOPES[Role.SUBMITTER], token)  # let in a moment ago
    team.root.delete(f"/v1/tokens/{token}")
    with pytest.raises(Refused) as error, team.database.write() as session:
        usecases.create(session, caller, TokenRequest(name="late", owner=None, role=None, scopes=[], expires_days=1))
    assert error.value.code == "token-revoked"


@pytest.mark.parametrize(
    ("role", "scopes", "allowed"),
    [
        (Role.ADMIN, [], False),
        (Role.ADMIN, [Scope.JOBS_READ], False),
        (Role.SUBMITTER, [], False),
        (Role.SUBMITTER, [Scope.JOBS_WRITE], False),
        (Role.SUBMITTER, [Scope.JOBS_READ], True),
        (Role.VIEWER, [Scope.JOBS_READ], True),
    ],
)
def test_token_cannot_revoke_tokens_with_more_rights_except_itself(
    team: Team, role: Role, scopes: list[Scope], allowed: bool
) -> None:
    narrow = team.member("ann", Role.SUBMITTER, Scope.TOKENS_WRITE, Scope.JOBS_READ)
    other = team.member("ann", role, *scopes)
    text = other.headers["authorization"].split("_")[1]
    answer = narrow.delete(f"/v1/tokens/{text}")
    if allowed:
        assert answer.status_code == 200 and problem_status_and_code(other.get("/v1/whoami")) == (401, "token-revoked")
    else:
        assert problem_status_and_code(answer) == (403, "not-allowed") and other.get("/v1/whoami").status_code == 200
    own = narrow.get("/v1/whoami").json()["token"]
    assert narrow.delete(f"/v1/tokens/{own}").status_code == 200


def test_tokens_per_owner_are_limited_until_some_are_revoked(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet_service.usecases.tokens.MAX_VALID_TOKENS", 3)
    team.member("ann", Role.VIEWER, expires=datetime.now(UTC) - timedelta(days=1))  # not alive
    first = team.ann.post("/v1/tokens", json={}).json()
    assert team.ann.post("/v1/tokens", json={}).status_code == 201
    key = {"Idempotency-Key": "k"}
    assert problem_status_and_code(team.ann.post("/v1/tokens", json={}, headers=key)) == (409, "too-many-tokens")
    assert problem_status_and_code(team.root.post("/v1/tokens", json={"owner": "ann"})) == (409, "too-many-tokens")
    assert team.bob.post("/v1/tokens", json={}).status_code == 201
    team.ann.delete(f"/v1/tokens/{first['id']}")
    assert team.ann.post("/v1/tokens", json={}, headers=key).status_code == 201


def test_token_list_is_paged_newest_first_and_limited_to_own_tokens(team: Team) -> None:
    made = [team.ann.post("/v1/tokens", json={"name": f"n{i}"}).json()["id"] for i in range(5)]
    found: list[str] = []
    cursor = None
    while True:
        params = {"limit": 2} | ({} if cursor is None else {"cursor": cursor})
        page = team.ann.get("/v1/tokens", params=params).json()
        assert {t["owner"] for t in page["items"]} <= {"ann"}
        found += [t["id"] for t in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found[:5] == made[::-1] and len(found) == len(set(found)) == 6
    owners = {t["owner"] for t in team.root.get("/v1/tokens").json()["items"]}
    assert owners == {"ann", "bob", "eve", "root"}
    of_bob = team.root.get("/v1/tokens", params={"owner": "bob"}).json()["items"]
    assert [t["owner"] for t in of_bob] == ["bob"]
    of_no_token = pagination.encode(pagination.query_digest(of="tokens", owner=None, gone=False), ["zzzzzzzz"])
    for wrong in ({"gone": "true", "cursor": "x"}, {"cursor": of_no_token}):
        assert problem_status_and_code(team.ann.get("/v1/tokens", params=wrong)) == (400, "bad-cursor")
