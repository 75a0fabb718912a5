"""Bodies of the REST API about webhooks, and the types of what webhooks send."""

from __future__ import annotations

import difflib
from datetime import datetime
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ratchet_contract.api.roles import OWNER_PATTERN
from ratchet_contract.api.views import View
from ratchet_contract.phases import Event, EventType

Format = Literal["standard", "slack"]
TEST: Final = "webhook.test"
NOT_EXACT: Final = "job.resumed-not-exact"
NOTES: Final = "job.note."
_ENDS: Final = ("succeeded", "failed", "cancelled", "suspended")
_NEVER: Final = {
    Event.PATCH,
    Event.DELETE,
    Event.FORK,
    *(f"end-{one}" for one in _ENDS),
}  # not stored, or sent as an end
TYPES: Final = frozenset({*(f"job.{one}" for one in ({*Event, *EventType, *_ENDS} - _NEVER)), NOT_EXACT})
"""All types but those of notes, which begin with ``NOTES``."""
DEFAULT_TYPES: Final = (
    "job.succeeded", "job.failed", "job.cancelled", "job.alert", NOT_EXACT, "job.replay-difference",
    "job.checkpoint-failed", "job.checkpoint-quarantined", "job.not-proved-dead", "job.webhook-disabled",
    "job.webhook-gave-up",
)  # fmt: skip


def _check_url(url: str) -> str:
    """Return ``url``. Raise ``ValueError`` unless it is http or https with a host, without user and password."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("must be like https://host/path, in ASCII")
    if "@" in parts.netloc:
        raise ValueError("may not hold a user or a password: put a secret into the path, or verify the signature")
    return parts.scheme + url[len(parts.scheme) :]  # in small letters


def _check_type(text: str) -> str:
    """Return ``text``. Raise ``ValueError`` if it selects no type that exists."""
    begin = text.removesuffix("*")
    if text in TYPES or text.startswith(NOTES):
        return text
    if begin != text and (NOTES.startswith(begin) or any(name.startswith(begin) for name in TYPES)):
        return text
    near = difflib.get_close_matches(text, TYPES, 1)
    raise ValueError(f"no event has the type {text!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


Url = Annotated[str, Field(max_length=2000, description="http or https."), AfterValidator(_check_url)]
Types = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=80), AfterValidator(_check_type)]],
    Field(min_length=1, max_length=100, description="Types of events to send; `*` at the end stands for any ending."),
]
Owner = Annotated[str | None, Field(pattern=OWNER_PATTERN, description="Only jobs of this owner; null: of all.")]
Label = Annotated[
    str | None,
    Field(pattern=r"^[^=\x00]{1,63}=[^\x00]{0,255}$", description="Only jobs with this label, `key=value`; null: all."),
]


class WebhookRequest(BaseModel):
    """Body of ``POST /v1/webhooks``: the endpoint to create."""

    model_config = ConfigDict(extra="forbid")

    url: Url
    types: Types = list(DEFAULT_TYPES)
    owner: Owner = None
    label: Label = None
    format: Format = Field(
        "standard",
        description="`standard`: Standard Webhooks, signed JSON. `slack`: a text for Slack's incoming webhooks.",
    )


class WebhookChange(BaseModel):
    """Body of ``PATCH /v1/webhooks/{webhook_id}``: an omitted key does not change."""

    model_config = ConfigDict(extra="forbid")

    url: Url = ""
    types: Types = []
    owner: Owner = None
    label: Label = None
    enabled: bool = Field(True, description="true continues with the first event that was not delivered.")
    from_now: bool = Field(False, description="true drops all events so far that were not delivered.")


class WebhookView(View):
    """An endpoint without its secret, which cannot be read again."""

    SHOWN = ("id", "url", "format", "enabled")

    id: str
    url: str = Field(description="Without its path for the format `slack`, since that is a secret.")
    types: list[str]
    owner: str | None = None
    label: str | None = None
    format: Format
    enabled: bool
    disabled_reason: str | None = None
    disabled_at: datetime | None = None
    pending: int = Field(
        description="Events to send again, one of each job at most: the job's later events wait for it."
    )
    failures: int = Field(description="Failed deliveries in a row, of any job.")
    new_after: datetime | None = Field(
        None, description="New events wait until then: the receiver is down, or asked for a pause."
    )
    created_at: datetime
    created_by: str
    old_secret_until: datetime | None = Field(
        None, description="Until then, deliveries are signed with the secret before the rotation, too."
    )


class WebhookMade(WebhookView):
    """An endpoint with its new secret."""

    secret: str | None = Field(
        description="Shown this once. null: format `slack`, which has none, or the response to a repeated request with the same "
        "Idempotency-Key; rotate the secret then."
    )


class DeliveryView(View):
    """The delivery of one event to one endpoint."""

    SHOWN = ("event_id", "job_id", "type", "status", "answer")

    event_id: int
    job_id: str
    type: str
    status: str = Field(
        description="`delivered`; `retrying`; `waiting`: to be sent next; `failed`: given up; "
        "`dropped`: the job was deleted, or `from_now` was requested."
    )
    tries: int
    answer: int | None = Field(None, description="HTTP status of the last answer; null: there was none.")
    error: str | None = None
    next_try: datetime | None = None
    at: datetime = Field(description="Of the last change.")


class WebhookTest(View):
    """The result of a test delivery."""

    delivered: bool
    answer: int | None = Field(None, description="HTTP status; null: there was no answer.")
    error: str | None = None
    seconds: float
