"""Log records as readable text or as one JSON object per line, with tokens and passwords hidden as far as they are recognised.
Fields such as the job's id come from a context variable."""

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
FIELDS: Final = ("job_id", "attempt", "node", "request_id", "incident")
"""Names of a record's fields. ``log_fields``, ``add_log_fields`` and the ``extra`` of a log call set them; unknown ones are
absent."""
_context_fields: ContextVar[dict[str, Any]] = ContextVar("ratchet_log_about", default={})  # noqa: B039  (replaced, never changed)
_TOKENS: Final = re.compile(r"\b(rt_[a-z0-9]{8}_)[A-Za-z0-9]+|(?i:\b(bearer )[^\s'\",;]+)")
_URL_PASSWORD: Final = re.compile(r"(://[^\s:/@]*:)[^\s/@]+(@)")
_HIDDEN: Final = "***"


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Add ``fields`` to the log records of this thread or task within the block. The JSON format logs those in ``FIELDS``."""
    token = _context_fields.set({**_context_fields.get(), **fields})
    try:
        yield
    finally:
        _context_fields.reset(token)


def add_log_fields(**fields: Any) -> None:
    """Add ``fields``, except None, to the log records that this task makes from now on. The JSON format logs those in
    ``FIELDS``."""
    _context_fields.set(
        {**_context_fields.get(), **{name: value for name, value in fields.items() if value is not None}}
    )


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return those of ``FIELDS`` that are set, from the context and from ``record``'s log call, which takes precedence."""
    found = dict(_context_fields.get())
    found.update({name: getattr(record, name) for name in FIELDS if hasattr(record, name)})
    return {name: found[name] for name in FIELDS if name in found}


class Text(logging.Formatter):
    """Formats records as readable text, with secrets hidden. ``FIELDS`` are not printed."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._hide = Hide(secrets)

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


class Json(logging.Formatter):
    """Formats each record as one JSON object on a line. Secrets are hidden in message, traceback and stack, not in fields."""

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
    """Replaces secrets in a text with ``***``: ``secrets``, passwords in URLs, the word after "Bearer", and Ratchet's tokens."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return ``text`` with all secrets replaced."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        text = _URL_PASSWORD.sub(rf"\1{_HIDDEN}\2", text)
        return _TOKENS.sub(lambda found: f"{found[1] or found[2]}{_HIDDEN}", text)


def configure(level: str, log_format: LogFormat, secrets: Iterable[str] = (), stream: TextIO | None = None) -> None:
    """Send log records from ``level`` on, and Python's warnings, to ``stream`` (None: standard error). Removes the root logger's
    earlier handlers. ``secrets``: more texts to hide."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Json(secrets) if log_format == "json" else Text(secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs whole URLs
