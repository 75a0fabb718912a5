"""Read quotas with their current usage, set them, delete them."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.quotas import EVERYBODY, QuotaRequest, QuotaUse, QuotaView
from ratchet_contract.api.views import Page
from ratchet_contract.errors import NotFound
from ratchet_service.db import audit
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Quota
from ratchet_service.scheduling import queue_queries, quotas
from ratchet_service.scheduling.fair_order import Share


def list_quotas(session: Session) -> Page[QuotaView]:
    """Return all quotas that are set, that of ``*`` first, each with its owner's current use; ``*`` has no use."""
    rows = session.scalars(sa.select(Quota).order_by(Quota.owner != EVERYBODY, Quota.owner))
    held = queue_queries.held_by_owner(session)
    return Page[QuotaView](items=[_view(session, row.owner, row, held) for row in rows])


def get_quota(session: Session, owner: str) -> QuotaView:
    """Return the quota that applies to ``owner``: the owner's own, else that of ``*``, else one without limits."""
    row = session.get(Quota, owner) or session.get(Quota, EVERYBODY)
    return _view(session, owner, row, queue_queries.held_by_owner(session))


def set_quota(session: Session, owner: str, request: QuotaRequest) -> QuotaView:
    """Replace the owner's whole quota, and return it. The limits apply to later submissions, resumes and starts."""
    row = session.get(Quota, owner, with_for_update=True)
    limits = request.model_dump()
    changes = audit.differences(_limits(row), limits)
    if row is None or changes:
        row = row or Quota(owner=owner)
        for kind, limit in limits.items():
            setattr(row, kind, limit)
        row.updated_at = now_in(session)
        session.add(row)
        audit.record(session, AuditAction.SET_QUOTA, "quota", owner, owner, changes)
        session.flush()
    return _view(session, owner, row, queue_queries.held_by_owner(session))


def delete_quota(session: Session, owner: str) -> None:
    """Delete the owner's own quota; that of ``*``, if any, then applies. Raise ``NotFound`` if the owner has none."""
    row = session.get(Quota, owner, with_for_update=True)
    if row is None:
        raise NotFound(f"{owner} has no quota of its own", code="quota-not-found")
    audit.record(session, AuditAction.DELETE_QUOTA, "quota", owner, owner, audit.differences(_limits(row), {}))
    session.delete(row)


def _limits(row: Quota | None) -> dict[str, int | None]:
    """Return the limits of the quota ``row`` by kind; empty if there is no row."""
    return {} if row is None else {kind: getattr(row, kind) for kind in QuotaRequest.model_fields}


def _view(session: Session, owner: str, row: Quota | None, held: Mapping[str, Share]) -> QuotaView:
    """Return the API's view of the quota ``row`` (None: no limits) for ``owner``, with the owner's use; ``*`` has none."""
    use = None
    if owner != EVERYBODY:
        has = held.get(owner, Share())
        use = QuotaUse(queued=quotas.count_queued(session, owner), jobs=has.jobs, ranks=has.ranks, gpus=has.gpus)
    return QuotaView(
        owner=owner,
        queued=row.queued if row else None,
        jobs=row.jobs if row else None,
        ranks=row.ranks if row else None,
        gpus=row.gpus if row else None,
        source="none" if row is None else "own" if row.owner == owner else "everybody",
        in_use=use,
        updated_at=row.updated_at if row else None,
    )
