"""Quotas: read with what is in use, set, taken away."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api import Page
from ratchet_contract.api_quotas import EVERYBODY, QuotaRequest, QuotaUse, QuotaView
from ratchet_contract.errors import NotFound
from ratchet_service import queue_rows, quotas
from ratchet_service.clock import now_in
from ratchet_service.models import Quota
from ratchet_service.queue_order import Share


def every(session: Session) -> Page[QuotaView]:
    """Those that were set, ``*`` first."""
    rows = session.scalars(sa.select(Quota).order_by(Quota.owner != EVERYBODY, Quota.owner))
    held = queue_rows.held(session)
    return Page[QuotaView](items=[_view(session, row.owner, row, held) for row in rows])


def of(session: Session, owner: str) -> QuotaView:
    """What counts for the owner, wherever it comes from."""
    row = session.get(Quota, owner) or session.get(Quota, EVERYBODY)
    return _view(session, owner, row, queue_rows.held(session))


def put(session: Session, owner: str, request: QuotaRequest) -> QuotaView:
    """The whole quota. What runs already goes on, and so do jobs that are queued: the limits count for what comes."""
    row = session.get(Quota, owner, with_for_update=True)
    if row is None:
        row = Quota(owner=owner)
        session.add(row)
    row.queued, row.jobs, row.ranks, row.gpus = request.queued, request.jobs, request.ranks, request.gpus
    row.updated_at = now_in(session)
    session.flush()
    return _view(session, owner, row, queue_rows.held(session))


def delete(session: Session, owner: str) -> None:
    """From now on that of ``*`` counts for the owner, if there is one. Raises ``NotFound``."""
    row = session.get(Quota, owner, with_for_update=True)
    if row is None:
        raise NotFound(f"{owner} has no quota of its own", code="quota-not-found")
    session.delete(row)


def _view(session: Session, owner: str, row: Quota | None, held: Mapping[str, Share]) -> QuotaView:
    use = None
    if owner != EVERYBODY:
        has = held.get(owner, Share())
        use = QuotaUse(queued=quotas.queued(session, owner), jobs=has.jobs, ranks=has.ranks, gpus=has.gpus)
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
