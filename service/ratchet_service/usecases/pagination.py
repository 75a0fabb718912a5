"""Opaque cursors: a position in one query's order. A malformed cursor, or one of another query, is refused."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from typing import Any

from ratchet_contract.errors import Refused
from ratchet_contract.spec.parse import canonical_json

_MAX_INT = 2**63 - 1


def query_digest(**query: Any) -> str:
    """Return a digest that identifies a query in its cursors. ``query``: everything that determines the rows and their order."""
    return hashlib.sha256(canonical_json(query)).hexdigest()[:16]


def encode(query: str, position: list[str | int]) -> str:
    """Return the cursor for ``position`` in the query with the digest ``query``."""
    raw = json.dumps([query, *position], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decode(cursor: str | None, query: str, kinds: tuple[type, ...]) -> list[Any] | None:
    """Return the position in ``cursor``, with values of ``kinds``; None: no cursor. ``query``: digest of the present query.
    Raise ``Refused`` for a cursor that does not fit."""
    if cursor is None:
        return None
    wrong = unknown_cursor_error()
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        data = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        raise wrong from None
    if not isinstance(data, list) or len(data) != 1 + len(kinds):
        raise wrong
    if data[0] != query:
        raise Refused(
            "this cursor belongs to another query; keep filters, sort and path as they were", code="bad-cursor"
        )
    for value, kind in zip(data[1:], kinds, strict=True):
        if type(value) is not kind or not _storable(value):
            raise wrong
    return data[1:]


def unknown_cursor_error() -> Refused:
    """Return (not raise) the error for a malformed cursor, or one whose position is unknown."""
    return Refused("this cursor was not issued by this server; start again without it", code="bad-cursor")


def _storable(value: Any) -> bool:
    """Return True if the database can hold ``value``, which comes from a cursor."""
    if isinstance(value, int):
        return abs(value) <= _MAX_INT
    return not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)
