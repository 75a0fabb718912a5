"""Lists the audit log, newest first, along its indexes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction, AuditView
from ratchet_contract.api.roles import Role, Scope
from ratchet_contract.api.views import Page
from ratchet_service.db.models import AuditEntry
from ratchet_service.db.principal import Principal
from ratchet_service.usecases import pagination


@dataclass(frozen=True)
class AuditFilter:
    """Which entries to list; None: any. ``since`` is part of the interval, ``until`` is not."""

    actor: str | None = None
    owner: str | None = None
    action: AuditAction | None = None
    subject: str | None = None
    since: datetime | None = None
    until: datetime | None = None


def list_entries(
    session: Session, caller: Principal, wanted: AuditFilter, limit: int, cursor: str | None
) -> Page[AuditView]:
    """Return a page of entries, newest first. A caller who is no admin gets those of its own subjects and of its own actions.
    Those of tokens need the scope that lists tokens. Raise ``Refused`` for a bad cursor."""
    conditions = [
        getattr(AuditEntry, name) == value
        for name, value in asdict(wanted).items()
        if value is not None and name not in ("since", "until")
    ]
    if wanted.since is not None:
        conditions.append(AuditEntry.at >= wanted.since)
    if wanted.until is not None:
        conditions.append(AuditEntry.at < wanted.until)
    if Scope.TOKENS_WRITE not in caller.scopes:
        conditions.append(AuditEntry.subject_kind != "token")
    digest = pagination.query_digest(of="audit", **{k: v and str(v) for k, v in asdict(wanted).items()})
    after = pagination.decode(cursor, digest, (int,))
    if after is not None:
        last = session.get(AuditEntry, after[0])
        if last is None:
            raise pagination.unknown_cursor_error()
        position = sa.tuple_(sa.literal(last.at, AuditEntry.at.type), last.id)
        conditions.append(sa.tuple_(AuditEntry.at, AuditEntry.id) < position)
    order = (AuditEntry.at.desc(), AuditEntry.id.desc())
    # own subjects and own actions as two queries: one with OR could not use an index in the order of the list
    # an owner with the name local has not made the changes of callers without a token
    by_caller = (AuditEntry.actor == caller.owner) & AuditEntry.token.is_not(None)
    visible: list[sa.ColumnElement[bool]] = [AuditEntry.owner == caller.owner, by_caller]
    if caller.role is Role.ADMIN:
        visible = [sa.true()]
    ids = [sa.select(AuditEntry.id).where(one, *conditions).order_by(*order).limit(limit + 1) for one in visible]
    newest = sa.union_all(*(sa.select(one.subquery().c.id) for one in ids))
    query = sa.select(AuditEntry).where(AuditEntry.id.in_(newest)).order_by(*order).limit(limit + 1)
    rows = list(session.scalars(query))
    page = rows[:limit]
    following = pagination.encode(digest, [page[-1].id]) if len(rows) > limit else None
    return Page[AuditView](
        items=[AuditView.model_validate(row, from_attributes=True) for row in page], next_cursor=following
    )
