"""Webhooks: created, read, changed, rotated, tested and deleted by admins."""

from __future__ import annotations

import secrets
import string
import time
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.views import Page
from ratchet_contract.api.webhooks import (
    DeliveryView,
    WebhookChange,
    WebhookMade,
    WebhookRequest,
    WebhookTest,
    WebhookView,
)
from ratchet_contract.errors import Conflict, NotFound
from ratchet_service.db import audit
from ratchet_service.db.clock import now_in
from ratchet_service.db.engine import Database
from ratchet_service.db.leases import NO_LEASE
from ratchet_service.db.models import Event, Webhook, WebhookDelivery
from ratchet_service.scheduling.quotas import lock_until_commit
from ratchet_service.webhooks import message
from ratchet_service.webhooks.send import Sender

MAX_WEBHOOKS: Final = 50
_SAME: Final = WebhookView.model_fields.keys() - {"url", "enabled", "pending", "new_after"}
OVERLAP: Final = timedelta(hours=24)
"""Time after a rotation in which the old secret signs too."""


def create(session: Session, created_by: str, request: WebhookRequest) -> WebhookMade:
    """Create a webhook and return it with its secret, which cannot be read again. It gets events from now on; one that another
    transaction is just writing may be left out. Raise ``Conflict`` if there are ``MAX_WEBHOOKS``."""
    lock_until_commit(session, "webhooks")
    if (session.scalar(sa.select(sa.func.count()).select_from(Webhook)) or 0) >= MAX_WEBHOOKS:
        raise Conflict(f"there are {MAX_WEBHOOKS} webhooks already: delete one first", code="too-many-webhooks")
    row = Webhook(
        id="wh-" + "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(12)),
        **request.model_dump(),
        secret=None if request.format == "slack" else message.new_secret(),
        cursor=session.scalar(sa.select(sa.func.max(Event.id))) or 0,
        failures=0,
        created_at=now_in(session),
        created_by=created_by,
    )
    session.add(row)
    _record(session, AuditAction.CREATE_WEBHOOK, row, format=row.format)
    session.flush()
    return _made(session, row)


def list_webhooks(session: Session) -> Page[WebhookView]:
    """Return all webhooks on one page, oldest first."""
    rows = session.scalars(sa.select(Webhook).order_by(Webhook.created_at, Webhook.id))
    return Page[WebhookView](items=[view(session, row) for row in rows])


def find(session: Session, webhook_id: str, *, lock: bool = False) -> Webhook:
    """Return the webhook with this id. ``lock``: lock its row, and end the lease of the process that delivers to it, which reads
    the row again. Raise ``NotFound``."""
    row = session.get(Webhook, webhook_id, with_for_update=lock) if len(webhook_id) <= 16 else None
    if row is None:
        raise NotFound(
            f"there is no webhook {webhook_id[:64]!r}; `ratchet webhook ls` shows all", code="webhook-not-found"
        )
    if lock:
        for key, value in NO_LEASE.items():
            setattr(row, key, value)
    return row


def change(session: Session, webhook_id: str, request: WebhookChange) -> WebhookView:
    """Change what ``request`` has set. Enabling a disabled webhook continues with the first event that was not delivered, which
    gets all its tries again; with ``from_now`` the events so far are dropped first. Raise ``NotFound``."""
    row = find(session, webhook_id, lock=True)
    row.new_after = None  # a pause of the receiver before the change
    values = request.model_dump(exclude_unset=True)
    now = view(session, row).model_dump() | {"url": row.url, "from_now": False}
    if changed := sorted(key for key, value in values.items() if now[key] != value):
        _record(session, AuditAction.CHANGE_WEBHOOK, row, changed=changed)
    enabled, from_now = values.pop("enabled", None), values.pop("from_now", False)
    if from_now:
        _drop_events_so_far(session, row)
    for key, value in values.items():
        setattr(row, key, value)
    if enabled is False and row.disabled_at is None:
        row.disabled_at, row.disabled_reason = now_in(session), "disabled by an admin"
    if enabled is True and row.disabled_at is not None:
        row.disabled_at, row.disabled_reason, row.failures = None, None, 0
        pending = sa.update(WebhookDelivery).where(*_pending(webhook_id))
        session.execute(pending.values(tries=0, next_try=None).execution_options(synchronize_session=False))
    session.flush()
    return view(session, row)


def _drop_events_so_far(session: Session, row: Webhook) -> None:
    """Let the webhook begin with the next event; one that another transaction is just writing may be dropped, too."""
    row.cursor, row.failures = session.scalar(sa.select(sa.func.max(Event.id))) or row.cursor, 0
    dropped = {"status": "dropped", "error": "an admin let the webhook begin with new events", "next_try": None}
    pending = sa.update(WebhookDelivery).where(*_pending(row.id)).values(**dropped, at=now_in(session))
    session.execute(pending.execution_options(synchronize_session=False))


def rotate(session: Session, webhook_id: str) -> WebhookMade:
    """Give the webhook a new secret, and return it. For ``OVERLAP`` the old one signs too, not one of
    a further rotation in that time. Raise ``NotFound``, or ``Conflict``
    for the format ``slack``."""
    row = find(session, webhook_id, lock=True)
    if row.secret is None:
        raise Conflict("a webhook of the format slack has no secret: its URL is one", code="no-secret")
    now = now_in(session)
    if row.old_secret_until is None or row.old_secret_until <= now:
        row.old_secret, row.old_secret_until = row.secret, now + OVERLAP
    row.secret = message.new_secret()
    _record(session, AuditAction.ROTATE_WEBHOOK, row)
    session.flush()
    return _made(session, row)


def delete(session: Session, webhook_id: str) -> None:
    """Delete the webhook with its deliveries. Raise ``NotFound``."""
    row = find(session, webhook_id, lock=True)
    _record(session, AuditAction.DELETE_WEBHOOK, row)
    session.delete(row)


def _record(session: Session, action: AuditAction, row: Webhook, **data: Any) -> None:
    """Add a change of the webhook to the audit log, without its URL, which may be a secret."""
    audit.record(session, action, "webhook", row.id, row.created_by, data)


def test(database: Database, sender: Sender, webhook_id: str) -> WebhookTest:
    """Send an event of the type ``webhook.test`` now, also if the webhook is disabled, and return the result. Blocks. Raise
    ``NotFound``."""
    with database.read() as session:
        row = find(session, webhook_id)
    made, began = message.of_test(row), time.monotonic()
    answer = sender.send(row.url, message.headers(row, made, database.clock.now()), made.body)
    seconds = round(time.monotonic() - began, 3)
    return WebhookTest(delivered=answer.error is None, answer=answer.status, error=answer.error, seconds=seconds)


def deliveries(session: Session, webhook_id: str, limit: int) -> Page[DeliveryView]:
    """Return the deliveries of the last events, newest event first. Raise ``NotFound``."""
    find(session, webhook_id)
    query = sa.select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id)
    rows = session.scalars(query.order_by(WebhookDelivery.event_id.desc()).limit(limit))
    return Page[DeliveryView](items=[_delivery(row) for row in rows])


def _delivery(row: WebhookDelivery) -> DeliveryView:
    """Return the API's view of a delivery."""
    status = row.status if row.status != "pending" else "waiting" if row.tries == 0 else "retrying"
    same = {name: getattr(row, name) for name in DeliveryView.model_fields}
    return DeliveryView.model_validate(same | {"status": status})


def _pending(webhook_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the SQL conditions for the webhook's rows of events that are still to be delivered."""
    return WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.status == "pending"


def view(session: Session, row: Webhook) -> WebhookView:
    """Return the API's view of a webhook, without its secret; for the format ``slack`` the URL's path is one."""
    parts = urlsplit(row.url)
    url = f"{parts.scheme}://{parts.netloc}/..." if row.format == "slack" else row.url
    pending = session.scalar(sa.select(sa.func.count()).select_from(WebhookDelivery).where(*_pending(row.id)))
    waits = row.new_after is not None and row.new_after > now_in(session)
    own = {"url": url, "enabled": row.disabled_at is None, "pending": pending or 0}
    own["new_after"] = row.new_after if waits else None
    return WebhookView.model_validate({name: getattr(row, name) for name in _SAME} | own)


def _made(session: Session, row: Webhook) -> WebhookMade:
    """Return the API's view of a webhook with its secret."""
    return WebhookMade(**view(session, row).model_dump(), secret=row.secret)
