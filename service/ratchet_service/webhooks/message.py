"""What webhooks send: the type of an event, the body of a delivery and its signature (Standard Webhooks 1.0)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from ratchet_contract.api.webhooks import NOT_EXACT, TEST
from ratchet_contract.phases import EventType, JobPhase
from ratchet_service.db.models import Event, Webhook

_ENDS: Final = (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED, JobPhase.SUSPENDED)
_PREFIX: Final = "whsec_"
_MAX_TEXT: Final = 2000  # characters
_MAX_DETAILS: Final = 8000  # characters of JSON


class Message(NamedTuple):
    """The body of a delivery and its id, which is the same for each try; receivers recognise repetitions by it."""

    id: str
    body: bytes


def type_of(event: Event) -> str:
    """Return the type under which an event is sent: ``job.`` and its type, but ``job.failed`` and the like for a transition that
    ends or suspends the job, and ``job.resumed-not-exact``."""
    after = event.data.get("to")
    if after in _ENDS and event.data.get("from") != after:
        return f"job.{str(after).lower()}"
    if event.type == EventType.RESUMED and event.data.get("verdict") == "not-exact":
        return NOT_EXACT
    return f"job.{event.type}"


def matches(types: list[str], name: str) -> bool:
    """True if ``name`` is in ``types``, or begins with an entry that ends in ``*``."""
    return any(name == one or (one.endswith("*") and name.startswith(one[:-1])) for one in types)


def of_event(webhook: Webhook, event: Event, job_name: str, owner: str) -> Message:
    """Return the message for an event. It depends on nothing that may change between two tries."""
    kind, text = type_of(event), event.message
    text = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
    # the time too: a database restored from a backup assigns ids again
    ident = f"{webhook.id}_{event.id}_{int(event.at.timestamp())}"
    if webhook.format == "slack" and event.type == EventType.ALERT:
        level, step = event.data.get("level"), event.data.get("step")
        return Message(ident, _slack(f"alert: {text} ({level}, step {step} of {job_name}, {event.job_id}, {owner})"))
    if webhook.format == "slack":
        return Message(ident, _slack(f"{kind}: {job_name} ({event.job_id}, {owner}): {text}"))
    fits = len(json.dumps(event.data)) <= _MAX_DETAILS
    data = {
        "event_id": event.id,
        "job": {"id": event.job_id, "name": job_name, "owner": owner},
        "attempt": event.attempt,
        "message": text,
        "details": event.data if fits else None,  # null: too long; the job's history has them
    }
    return Message(ident, _body(kind, event.at, data))


def of_test(webhook: Webhook) -> Message:
    """Return a new message of the type ``webhook.test``."""
    ident = f"{webhook.id}_test_{secrets.token_hex(8)}"
    if webhook.format == "slack":
        return Message(ident, _slack(f"A test of Ratchet's webhook {webhook.id}"))
    return Message(ident, _body(TEST, datetime.now(UTC), {"webhook_id": webhook.id}))


def _body(kind: str, at: datetime, data: dict[str, Any]) -> bytes:
    """Return the JSON body of the format ``standard``. ``at``: when it happened."""
    when = at.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"type": kind, "timestamp": when, "data": data}, separators=(",", ":")).encode()


def _slack(text: str) -> bytes:
    """Return the JSON body of Slack's incoming webhooks; ``text`` is shown without formatting commands in it."""
    for special, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(special, escaped)
    return json.dumps({"text": text}).encode()


def new_secret() -> str:
    """Return a random secret: ``whsec_`` and 32 bytes in base64."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode("ascii")


def headers(webhook: Webhook, message: Message, now: datetime) -> dict[bytes | str, bytes | str]:
    """Return the headers of a try at ``now``. Until the end of a rotation's overlap there are two signatures."""
    out: dict[bytes | str, bytes | str] = {"Content-Type": "application/json", "User-Agent": "Ratchet-Webhooks"}
    keys = [webhook.secret]
    if webhook.old_secret_until is not None and now < webhook.old_secret_until:
        keys.append(webhook.old_secret)
    signed_at = int(now.timestamp())
    signatures = [sign(key, message, signed_at) for key in keys if key is not None]
    if signatures:
        out |= {"webhook-id": message.id, "webhook-timestamp": str(signed_at)}
        out["webhook-signature"] = " ".join(signatures)
    return out


def sign(secret: str, message: Message, signed_at: int) -> str:
    """Return the signature of a message that is sent at ``signed_at`` (seconds since 1970)."""
    key = binascii.a2b_base64(secret.removeprefix(_PREFIX))
    content = b"%s.%d.%s" % (message.id.encode(), signed_at, message.body)
    return "v1," + base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode("ascii")
