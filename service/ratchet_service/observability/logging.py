"""Log records as readable text or as one JSON object per line. Fields such as the job's id come from a context variable.

Neither format contains secrets: tokens are recognised by their form, the database's password is passed at the start.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

LogFormat = Literal["text", "json"]
FORMATS: Final[tuple[LogFormat, ...]] = ("text", "json")
FIELDS: Final = ("job_id", "attempt", "node", "request_id", "incident")
"""A record's fields, where they are known; a log call's ``extra`` may set them, too."""
_context_fields: ContextVar[dict[str, Any]] = ContextVar("ratchet_log_about", default={})  # noqa: B039  (replaced, never changed)
_TOKENS: Final = re.compile(r"\b(rt_[a-z0-9]{8}_)[A-Za-z0-9]+|(?i:\b(bearer )[^\s'\",;]+)")
_URL_PASSWORD: Final = re.compile(r"(://[^\s:/@]*:)[^\s/@]+(@)")
_HIDDEN: Final = "***"


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Add ``fields`` to records that this thread or task makes within the block."""
    token = _context_fields.set({**_context_fields.get(), **fields})
    try:
        yield
    finally:
        _context_fields.reset(token)


def add_log_fields(**fields: Any) -> None:
    """Add ``fields`` to records that the rest of this task, one request, makes. None values are left out."""
    _context_fields.set(
        {**_context_fields.get(), **{name: value for name, value in fields.items() if value is not None}}
    )


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    found = dict(_context_fields.get())
    found.update({name: getattr(record, name) for name in FIELDS if hasattr(record, name)})
    return {name: found[name] for name in FIELDS if name in found}


class Text(logging.Formatter):
    """Readable text; ``FIELDS`` are not printed, since the messages contain them."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._hide = Hide(secrets)

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


class Json(logging.Formatter):
    """One JSON object per line: time (UTC, RFC 3339), level, logger, message; ``FIELDS`` where known; exception."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._hide = Hide(secrets)

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {
            "time": at,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._hide(record.getMessage()),
            **fields_of(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self._hide(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = self._hide(record.stack_info)
        return json.dumps(line, ensure_ascii=True, default=str)  # escapes line breaks


class Hide:
    """Replace secrets in a text with ``***``."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        text = _URL_PASSWORD.sub(rf"\1{_HIDDEN}\2", text)
        return _TOKENS.sub(lambda found: f"{found[1] or found[2]}{_HIDDEN}", text)


def configure(level: str, log_format: LogFormat, secrets: Iterable[str] = (), stream: TextIO | None = None) -> None:
    """Send the records of all loggers, including those of uvicorn, Alembic and ``warnings``, to ``stream``, or standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Json(secrets) if log_format == "json" else Text(secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs whole URLs
