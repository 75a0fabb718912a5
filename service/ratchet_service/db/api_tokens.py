"""API tokens: their text, their rows, and authentication. A token is ``rt_<id>_<secret>``; its row has the SHA-256 of the whole
text. A slow hash would add nothing, since a secret of 190 random bits cannot be guessed."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import string
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.roles import SCOPES, Role, Scope
from ratchet_contract.api.tokens import TokenView
from ratchet_contract.errors import Refused
from ratchet_service.db import audit
from ratchet_service.db.clock import now_in
from ratchet_service.db.engine import Database, first_line
from ratchet_service.db.models import ApiToken
from ratchet_service.db.principal import Principal

log = logging.getLogger(__name__)

TOO_MANY_TOKENS: Final = "too-many-tokens"
_BASE62: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 8
_SECRET_LENGTH: Final = 32
_TEXT: Final = re.compile(rf"rt_([a-z0-9]{{{_ID_LENGTH}}})_[A-Za-z0-9]{{{_SECRET_LENGTH}}}")
_LAST_USED_INTERVAL: Final = timedelta(minutes=1)


def create(
    session: Session,
    *,
    name: str,
    owner: str,
    role: Role,
    scopes: Sequence[Scope],
    expires_at: datetime | None,
    created_by: str,
    made_with: str | None = None,
) -> tuple[ApiToken, str]:
    """Add a token. Return its row, and its text, which is not stored. ``scopes``: empty for all scopes of the role; otherwise the
    caller checks that the role has them. ``made_with``: the id of the token with which this one was created; the revocation of
    that token revokes this one, too."""
    token_id = _new_id()
    while session.get(ApiToken, token_id) is not None:
        token_id = _new_id()
    text = f"rt_{token_id}_" + "".join(secrets.choice(_BASE62) for _ in range(_SECRET_LENGTH))
    row = ApiToken(id=token_id, name=name, owner=owner, role=role, token_hash=hash_token(text), created_by=created_by)
    row.made_with = made_with
    row.scopes = sorted(scope.value for scope in set(scopes))
    row.created_at, row.expires_at = now_in(session), expires_at
    session.add(row)
    data = {"name": name, "role": role.value, "scopes": row.scopes, "expires_at": expires_at and expires_at.isoformat()}
    audit.record(session, AuditAction.CREATE_TOKEN, "token", token_id, owner, data)
    session.flush()
    return row, text


def revoke(session: Session, row: ApiToken, now: datetime) -> int:
    """Revoke the token and, recursively, all tokens made with it. Return how many of these other tokens this call revoked; those
    that were revoked before do not count."""
    others, makers = 0, [row.id]
    # locked before the tokens made with it are read; ``lock_token`` locks it before one is made: none is missed
    session.refresh(row, with_for_update=True)
    changed = row.revoked_at is None
    row.revoked_at = row.revoked_at or now
    while makers:
        query = sa.select(ApiToken).where(ApiToken.made_with.in_(makers)).order_by(ApiToken.id).with_for_update()
        made = session.scalars(query.execution_options(populate_existing=True)).all()
        for child in made:
            if child.revoked_at is None:
                child.revoked_at, others = now, others + 1
                data = {"name": child.name, "with": row.id}
                audit.record(session, AuditAction.REVOKE_TOKEN, "token", child.id, child.owner, data)
        session.flush()
        makers = [child.id for child in made]
    if changed or others:
        counted = {"name": row.name, "also_revoked": others}
        audit.record(session, AuditAction.REVOKE_TOKEN, "token", row.id, row.owner, counted)
    return others


def lock_token(session: Session, token_id: str) -> None:
    """Lock the token's row until the transaction ends, before a token is made with it. Raises ``Refused`` (``token-revoked``)
    if it is revoked or missing."""
    row = session.get(ApiToken, token_id, with_for_update=True, populate_existing=True)
    if row is None or row.revoked_at is not None:
        raise _token_revoked(token_id)


def _token_revoked(token_id: str) -> Refused:
    """Return the error for a revoked token."""
    return Refused(f"the token {token_id} was revoked: ask an admin for another", code="token-revoked")


def _new_id() -> str:
    """Return a random token id, which may be in use."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(_ID_LENGTH))


def authenticate(database: Database, text: str) -> Principal:
    """Return the caller with this token text; may store the time of use. Raises ``Refused`` for an invalid token."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise _token_unknown()
    now = database.clock.now()
    with database.read() as session:
        row = session.get(ApiToken, match[1])
        if row is None or not hmac.compare_digest(hash_token(text), row.token_hash):
            raise _token_unknown()
        if row.revoked_at is not None:
            raise _token_revoked(row.id)
        if row.expires_at is not None and row.expires_at <= now:
            text = f"the token {row.id} has expired: ask for another (`ratchet token create`)"
            raise Refused(text, code="token-expired")
        found = principal_of(row)
        stale = row.last_used_at is None or row.last_used_at < now - _LAST_USED_INTERVAL
    if stale:
        try:
            _mark_used(database, match[1], now)
        except SQLAlchemyError as error:  # a full disk or a read-only server: requests that only read still work
            log.warning("the use of token %s was not recorded: %s", match[1], first_line(error))
    return found


def _token_unknown() -> Refused:
    """Return the error for a token that this service does not know."""
    return Refused("this service does not know this token: check which token is sent, and to which server",
                   code="token-unknown")  # fmt: skip


def principal_of(row: ApiToken) -> Principal:
    """Return the caller that this token stands for. A row without scopes gives all scopes of its role."""
    allowed = SCOPES[row.role]
    if row.scopes:
        allowed = frozenset(scope for scope in allowed if scope.value in row.scopes)
    return Principal(row.owner, row.role, allowed, row.id, row.expires_at, row.name)


def _mark_used(database: Database, token_id: str, now: datetime) -> None:
    """Store ``now`` as the token's time of last use, unless a time within the last minute is stored."""
    with database.write() as session:
        old = sa.or_(ApiToken.last_used_at.is_(None), ApiToken.last_used_at < now - _LAST_USED_INTERVAL)
        session.execute(sa.update(ApiToken).where(ApiToken.id == token_id, old).values(last_used_at=now))


def token_view(row: ApiToken) -> TokenView:
    """Return the token as the API shows it, without its hash."""
    known = {scope.value for scope in Scope}
    return TokenView(
        id=row.id,
        name=row.name,
        owner=row.owner,
        role=row.role,
        scopes=[Scope(text) for text in row.scopes if text in known],
        created_at=row.created_at,
        created_by=row.created_by,
        made_with=row.made_with,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )


def hash_token(token: str) -> str:
    """Return the hex SHA-256 of an API token or report token, which is stored instead of it."""
    return hashlib.sha256(token.encode()).hexdigest()
