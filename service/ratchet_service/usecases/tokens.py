"""Tokens: made with no more than their maker's own rights, listed without their text, revoked for good."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.access import SCOPES, Role
from ratchet_contract.api import Page
from ratchet_contract.api_access import TokenMade, TokenRequest, TokenRevoked, TokenView
from ratchet_contract.errors import Conflict, FieldProblem, NotFound, Refused, SpecError
from ratchet_service import cursors, quotas, tokens
from ratchet_service.clock import now_in
from ratchet_service.models import ApiToken
from ratchet_service.tokens import Principal, principal_of, token_view

MOST_ALIVE: Final = 200
"""Tokens of one owner that are neither revoked nor expired."""


def create(session: Session, caller: Principal, request: TokenRequest) -> TokenMade:
    """Raises ``SpecError`` (``not-allowed``) for more than ``caller`` has, and for scopes that the role has not; ``Refused``
    (``token-revoked``) where the caller's own token has been meanwhile; ``Conflict`` (``too-many-tokens``)."""
    owner, role = request.owner or caller.owner, request.role or caller.role
    scopes = frozenset(request.scopes) or SCOPES[role]
    expires = None if request.expires_days is None else now_in(session) + timedelta(days=request.expires_days)
    if "expires_days" not in request.model_fields_set and caller.expires_at is not None and expires is not None:
        expires = min(expires, caller.expires_at)
    problems = []
    if owner != caller.owner and caller.role is not Role.ADMIN:
        problems.append(_problem("/owner", f"you are {caller.owner}: only an admin makes tokens for others"))
    if not caller.role.includes(role):
        problems.append(_problem("/role", f"you come as {caller.role.value}, which is less than {role.value}"))
    if beyond := sorted(scopes - SCOPES[role]):
        problems.append(_problem("/scopes", f"the role {role.value} has not {', '.join(beyond)}"))
    elif beyond := sorted(scopes - caller.scopes):
        problems.append(_problem("/scopes", f"your own token has not {', '.join(beyond)}"))
    if caller.expires_at is not None and (expires is None or expires > caller.expires_at):
        ends = caller.expires_at.isoformat(timespec="seconds")
        problems.append(_problem("/expires_days", f"your own token ends at {ends}: this one may not end later"))
    if problems:
        raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", code="not-allowed", errors=problems)
    if caller.token is not None:
        tokens.hold(session, caller.token)
    _count(session, owner)
    row, text = tokens.make(
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


def _count(session: Session, owner: str) -> None:
    quotas.one_at_a_time(session, f"tokens of {owner}")
    there = session.scalar(_alive(session, sa.select(sa.func.count()).where(ApiToken.owner == owner))) or 0
    if there >= MOST_ALIVE:
        raise Conflict(
            f"{owner} has {there} tokens that are good, and may have {MOST_ALIVE}: revoke those that are not used "
            "(`ratchet token list`), and give short-lived ones an end (`--expires 1h`)",
            code=tokens.TOO_MANY,
        )


def _alive(session: Session, query: sa.Select[Any]) -> sa.Select[Any]:
    ends_later = sa.or_(ApiToken.expires_at.is_(None), ApiToken.expires_at > now_in(session))
    return query.where(ApiToken.revoked_at.is_(None), ends_later)


def _problem(pointer: str, text: str) -> FieldProblem:
    return FieldProblem(pointer=pointer, code="not-allowed", detail=text)


def list_tokens(
    session: Session, caller: Principal, owner: str | None, gone: bool, limit: int, cursor: str | None
) -> Page[TokenView]:
    """Newest first; an admin sees everybody's. ``gone``: those that were revoked or have expired, too."""
    query = sa.select(ApiToken)
    if caller.role is not Role.ADMIN:
        query = query.where(ApiToken.owner == caller.owner)
    if owner is not None:
        query = query.where(ApiToken.owner == owner)
    if not gone:
        query = _alive(session, query)
    digest = cursors.query_digest(of="tokens", owner=owner, gone=gone)
    after = cursors.decode(cursor, digest, (str,))
    ordered = query.order_by(ApiToken.created_at.desc(), ApiToken.id.desc())
    if after is not None:
        last = session.get(ApiToken, after[0])
        if last is not None:
            position = sa.tuple_(sa.literal(last.created_at, ApiToken.created_at.type), last.id)
            ordered = ordered.where(sa.tuple_(ApiToken.created_at, ApiToken.id) < position)
    rows: Sequence[ApiToken] = list(session.scalars(ordered.limit(limit + 1)))
    page = rows[:limit]
    following = cursors.encode(digest, [page[-1].id]) if len(rows) > limit else None
    return Page[TokenView](items=[token_view(row) for row in page], next_cursor=following)


def find(session: Session, caller: Principal, token_id: str) -> ApiToken:
    """One's own, or anybody's for an admin; of others' nothing is told. Raises ``NotFound``."""
    row = session.get(ApiToken, token_id) if len(token_id) <= 16 else None
    if row is None or (row.owner != caller.owner and caller.role is not Role.ADMIN):
        raise NotFound(f"no token {token_id[:64]!r} is yours to see; `ratchet token list` shows those that are",
                       code="token-not-found")  # fmt: skip
    return row


def revoke(session: Session, caller: Principal, token_id: str) -> TokenRevoked:
    """From now on it is refused, and with it all that were made with it. Revoking it again changes nothing.

    Raises ``NotFound``; ``Refused`` (``not-allowed``) for one that ``caller`` could not have made, as it has more rights.
    """
    row = find(session, caller, token_id)
    its = principal_of(row)
    if not caller.role.includes(its.role):
        text = f"the token {row.id} has the role {its.role.value}, and you come as {caller.role.value}"
        raise Refused(f"{text}: revoke it with one of its own role, or have an admin do it", code="not-allowed")
    if beyond := sorted(its.scopes - caller.scopes):
        text = f"the token {row.id} has the scopes {', '.join(beyond)}, which your own token has not"
        raise Refused(f"{text}: revoke it with itself, or with one that has them", code="not-allowed")
    others = tokens.revoke(session, row, now_in(session))
    return TokenRevoked(**token_view(row).model_dump(), also_revoked=others)
