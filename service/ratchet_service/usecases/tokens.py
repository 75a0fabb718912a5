"""API tokens: created with at most the creator's rights, listed without their text, revoked permanently."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.roles import SCOPES, Role
from ratchet_contract.api.tokens import TokenMade, TokenRequest, TokenRevoked, TokenView
from ratchet_contract.api.views import Page
from ratchet_contract.errors import Conflict, FieldProblem, NotFound, Refused, SpecError
from ratchet_service.db import api_tokens
from ratchet_service.db.api_tokens import principal_of, token_view
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import ApiToken
from ratchet_service.db.principal import Principal
from ratchet_service.scheduling import quotas
from ratchet_service.usecases import pagination

MAX_VALID_TOKENS: Final = 200
"""Maximum number of tokens of one owner that are neither revoked nor expired."""


def create(session: Session, caller: Principal, request: TokenRequest) -> TokenMade:
    """Create a token and return it with its text, which cannot be read again. Raise ``SpecError`` for rights, an owner or an
    expiry that the caller may not give, ``Refused`` if the caller's token was revoked, ``Conflict`` for too many tokens."""
    owner, role = request.owner or caller.owner, request.role or caller.role
    scopes = frozenset(request.scopes) or SCOPES[role]
    expires = None if request.expires_days is None else now_in(session) + timedelta(days=request.expires_days)
    if "expires_days" not in request.model_fields_set and caller.expires_at is not None and expires is not None:
        expires = min(expires, caller.expires_at)
    problems = []
    if owner != caller.owner and caller.role is not Role.ADMIN:
        problems.append(_problem("/owner", f"you are {caller.owner}: only an admin makes tokens for others"))
    if not caller.role.includes(role):
        problems.append(_problem("/role", f"your role is {caller.role.value}, which is less than {role.value}"))
    if beyond := sorted(scopes - SCOPES[role]):
        problems.append(_problem("/scopes", f"the role {role.value} lacks {', '.join(beyond)}"))
    elif beyond := sorted(scopes - caller.scopes):
        problems.append(_problem("/scopes", f"your own token lacks {', '.join(beyond)}"))
    if caller.expires_at is not None and (expires is None or expires > caller.expires_at):
        ends = caller.expires_at.isoformat(timespec="seconds")
        problems.append(_problem("/expires_days", f"your own token expires at {ends}: this one may not expire later"))
    if problems:
        raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", code="not-allowed", errors=problems)
    if caller.token is not None:
        api_tokens.lock_token(session, caller.token)
    _check_token_count(session, owner)
    row, text = api_tokens.create(
        session,
        name=request.name,
        owner=owner,
        role=role,
        scopes=request.scopes,
        expires_at=expires,
        created_by=caller.owner,
        made_with=caller.token,
    )
    return TokenMade(**token_view(row).model_dump(), token=text)


def _check_token_count(session: Session, owner: str) -> None:
    """Raise ``Conflict`` if the owner already has ``MAX_VALID_TOKENS`` valid tokens. The owner's other creations wait until this
    transaction ends."""
    quotas.lock_until_commit(session, f"tokens of {owner}")
    there = session.scalar(_valid_only(session, sa.select(sa.func.count()).where(ApiToken.owner == owner))) or 0
    if there >= MAX_VALID_TOKENS:
        raise Conflict(
            f"{owner} has {there} valid tokens, of {MAX_VALID_TOKENS} at most: revoke unused ones "
            "(`ratchet token list`), and create short-lived ones with an expiry (`--expires 1h`)",
            code=api_tokens.TOO_MANY_TOKENS,
        )


def _valid_only(session: Session, query: sa.Select[Any]) -> sa.Select[Any]:
    """Return ``query`` limited to tokens that are neither revoked nor expired."""
    ends_later = sa.or_(ApiToken.expires_at.is_(None), ApiToken.expires_at > now_in(session))
    return query.where(ApiToken.revoked_at.is_(None), ends_later)


def _problem(pointer: str, text: str) -> FieldProblem:
    """Return a problem with the code ``not-allowed``."""
    return FieldProblem(pointer=pointer, code="not-allowed", detail=text)


def list_tokens(
    session: Session, caller: Principal, owner: str | None, include_invalid: bool, limit: int, cursor: str | None
) -> Page[TokenView]:
    """Return a page of tokens, newest first: the caller's own tokens or, for an admin, the tokens of all owners. ``owner``:
    list only tokens of this owner. ``include_invalid``: list revoked and expired tokens too. Raise ``Refused`` for a bad
    cursor."""
    query = sa.select(ApiToken)
    if caller.role is not Role.ADMIN:
        query = query.where(ApiToken.owner == caller.owner)
    if owner is not None:
        query = query.where(ApiToken.owner == owner)
    if not include_invalid:
        query = _valid_only(session, query)
    digest = pagination.query_digest(of="tokens", owner=owner, gone=include_invalid)
    after = pagination.decode(cursor, digest, (str,))
    ordered = query.order_by(ApiToken.created_at.desc(), ApiToken.id.desc())
    if after is not None:
        last = session.get(ApiToken, after[0])
        if last is None:
            raise pagination.unknown_cursor_error()
        position = sa.tuple_(sa.literal(last.created_at, ApiToken.created_at.type), last.id)
        ordered = ordered.where(sa.tuple_(ApiToken.created_at, ApiToken.id) < position)
    rows: Sequence[ApiToken] = list(session.scalars(ordered.limit(limit + 1)))
    page = rows[:limit]
    following = pagination.encode(digest, [page[-1].id]) if len(rows) > limit else None
    return Page[TokenView](items=[token_view(row) for row in page], next_cursor=following)


def find(session: Session, caller: Principal, token_id: str) -> ApiToken:
    """Return the token with this id. Raise ``NotFound`` if there is none, or ``caller`` neither owns it nor is an admin."""
    row = session.get(ApiToken, token_id) if len(token_id) <= 16 else None
    if row is None or (row.owner != caller.owner and caller.role is not Role.ADMIN):
        raise NotFound(f"no token {token_id[:64]!r} is visible to you; `ratchet token list` shows the visible ones",
                       code="token-not-found")  # fmt: skip
    return row


def revoke(session: Session, caller: Principal, token_id: str) -> TokenRevoked:
    """Revoke a token and all tokens created with it, directly or indirectly. Return the token, and how many others were
    revoked with it. Raise ``NotFound``, or ``Refused`` for a token with more rights than ``caller``."""
    row = find(session, caller, token_id)
    its = principal_of(row)
    if not caller.role.includes(its.role):
        text = f"the token {row.id} has the role {its.role.value}, and your role is {caller.role.value}"
        raise Refused(f"{text}: revoke it with a token of that role, or ask an admin", code="not-allowed")
    if beyond := sorted(its.scopes - caller.scopes):
        text = f"the token {row.id} has the scopes {', '.join(beyond)}, which your own token lacks"
        raise Refused(f"{text}: revoke it with itself, or with a token that has them", code="not-allowed")
    others = api_tokens.revoke(session, row, now_in(session))
    return TokenRevoked(**token_view(row).model_dump(), also_revoked=others)
