"""Tokens made in the database itself, for tests."""

from __future__ import annotations

from datetime import datetime

from ratchet_contract.api.roles import Role, Scope
from ratchet_service.db import api_tokens
from ratchet_service.db.engine import Database


def make_token(database: Database, owner: str, role: Role, *scopes: Scope, expires: datetime | None = None) -> str:
    with database.write() as session:
        _, text = api_tokens.create(
            session, name="test", owner=owner, role=role, scopes=scopes, expires_at=expires, created_by="test"
        )
    return text


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
