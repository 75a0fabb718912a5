"""A service that wants tokens, and the people of a team with theirs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest

from ratchet_contract.api.roles import Role, Scope
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from ratchet_service.db.engine import Database
from tests.support.api import Api, FakeSubmission, Server
from tests.support.tokens import bearer, make_token


class Team:
    """``ann`` and ``bob`` submit, ``eve`` looks on, ``root`` is the admin; each is an HTTP client."""

    def __init__(self, url: str, database: Database, settings: Settings) -> None:
        self.url, self.database, self.settings = url, database, settings
        self.clients: list[httpx.Client] = []
        self.nobody = self.client()
        self.ann = self.member("ann", Role.SUBMITTER)
        self.bob = self.member("bob", Role.SUBMITTER)
        self.eve = self.member("eve", Role.VIEWER)
        self.root = self.member("root", Role.ADMIN)

    def client(self, token: str | None = None) -> httpx.Client:
        made = httpx.Client(
            base_url=self.url, timeout=30, verify=False, headers={} if token is None else bearer(token)
        )  # without TLS: to read the certificates takes 20 ms of a core, in each of five clients
        self.clients.append(made)
        return made

    def member(self, owner: str, role: Role, *scopes: Scope, expires: datetime | None = None) -> httpx.Client:
        return self.client(make_token(self.database, owner, role, *scopes, expires=expires))

    def api(self, client: httpx.Client) -> Api:
        """The same service as ``client``'s owner uses it."""
        return Api(client, self.database, self.settings, FakeSubmission())


@pytest.fixture(scope="session")
def token_required_service(
    migrated_database: Database, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Settings]]:
    settings = Settings(
        home=tmp_path_factory.mktemp("guarded"), tokens_required=True, follow_interval=0.02, refused_rate=1e6
    )
    with Server(create_app(settings, FakeSubmission(), migrated_database)) as url:
        yield url, settings


@pytest.fixture
def team(database: Database, token_required_service: tuple[str, Settings]) -> Iterator[Team]:
    """An empty database, but for the tokens of the members."""
    made = Team(token_required_service[0], database, token_required_service[1])
    yield made
    for client in made.clients:
        client.close()


def problem_status_and_code(answer: httpx.Response) -> tuple[int, Any]:
    """Status and code of a problem."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["code"]
