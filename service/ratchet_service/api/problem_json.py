"""Maps errors to HTTP statuses and ``application/problem+json`` bodies. Only the HTTP layer knows statuses."""

from __future__ import annotations

from typing import Final

from ratchet_contract.errors import (
    PROBLEM_TYPE_PREFIX,
    CheckpointError,
    Conflict,
    FieldProblem,
    NotFound,
    Problem,
    RatchetError,
    Refused,
    SpecError,
)
from ratchet_service.db.sanitize import printable

MEDIA_TYPE: Final = "application/problem+json"

_BY_CODE: Final[dict[str, int]] = {
    "invalid-json": 400,
    "invalid-yaml": 400,
    "invalid-character": 400,
    "bad-cursor": 400,
    "invalid-idempotency-key": 400,
    "malformed-head": 400,
    "protocol-mismatch": 400,
    "token-missing": 401,
    "token-unknown": 401,
    "token-expired": 401,
    "token-revoked": 401,
    "token-wrong": 403,
    "not-allowed": 403,
    "foreign-origin": 403,
    "file-unreadable": 403,
    "no-such-route": 404,
    "method-not-allowed": 405,
    "not-acceptable": 406,
    "precondition-failed": 412,
    "body-too-large": 413,
    "archive-too-large": 413,
    "too-many-files": 413,
    "unsupported-media-type": 415,
    "range-not-satisfiable": 416,
    "body-too-slow": 408,
    "too-many-requests": 429,
    "idempotency-key-reused": 422,
    "invalid-parameter": 422,
    "unknown-parameter": 422,
    "internal-error": 500,
    "busy": 503,
    "checkpoint-remote": 503,
    "database-unavailable": 503,
    "reconciler-failing": 503,
    "reconciler-stalled": 503,
    "run-directory-unwritable": 503,
    "schema-newer": 503,
    "schema-older": 503,
    "schema-unsupported": 503,
    "shutting-down": 503,
    "export-timeout": 504,
    "disk-full": 507,
}
_BY_CLASS: Final[tuple[tuple[type[RatchetError], int], ...]] = (
    (SpecError, 422),
    (NotFound, 404),
    (Conflict, 409),
    (CheckpointError, 409),
    (Refused, 422),
)
_TITLES: Final[dict[int, str]] = {
    400: "Malformed request",
    401: "Not authenticated",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    406: "Not acceptable",
    408: "Took too long",
    409: "Conflict",
    412: "Precondition failed",
    413: "Body too large",
    415: "Unsupported media type",
    416: "Range not satisfiable",
    422: "Invalid request",
    429: "Too many requests",
    500: "Internal error",
    503: "Temporarily unavailable",
    504: "Took too long",
    507: "No space left",
}
_HEADERS: Final[dict[int, dict[str, str]]] = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}


def status_of(error: RatchetError) -> int:
    """Return the HTTP status of the error, by its code or else by its class; 500 if neither is listed."""
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    return next((status for kind, status in _BY_CLASS if isinstance(error, kind)), 500)


def headers_of(status: int, code: str) -> dict[str, str]:
    """Return the headers that belong to a problem with this status and code, such as Retry-After."""
    extra = {"Retry-After": "1"} if code == "idempotency-in-progress" else {}
    return _HEADERS.get(status, {}) | extra


def problem(
    status: int, code: str, detail: str, *, instance: str | None = None, errors: list[FieldProblem] | None = None
) -> Problem:
    """Return a problem (RFC 9457) with the title of its status. ``instance``: the request's path; ``errors``: problems of single
    fields."""
    title = _TITLES.get(status, "Error")
    return Problem(
        type=PROBLEM_TYPE_PREFIX + code,
        title=title,
        status=status,
        detail=printable(detail),
        code=code,
        instance=instance,
        errors=[
            FieldProblem(pointer=printable(e.pointer), code=e.code, detail=printable(e.detail)) for e in errors or []
        ],
    )


def problem_of(error: RatchetError, instance: str | None = None) -> Problem:
    """Return the problem for ``error``. ``instance``: the request's path."""
    return problem(status_of(error), error.code, error.detail, instance=instance, errors=error.errors)
