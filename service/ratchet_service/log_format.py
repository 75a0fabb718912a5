"""Log records as text for people or as one JSON object a line for machines; what they are about comes from context variables.

Neither has secrets in it: tokens are recognised by their form, the database's password is told at the start.
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
"""Of a record, where they are known; ``extra`` of a call may give them, too."""
_about: ContextVar[dict[str, Any]] = ContextVar("ratchet_log_about", default={})  # noqa: B039  (replaced, never changed)
_TOKENS: Final = re.compile(r"\b(rt_[a-z0-9]{8}_)[A-Za-z0-9]+|(?i:\b(bearer )[^\s'\",;]+)")
_URL_PASSWORD: Final = re.compile(r"(://[^\s:/@]*:)[^\s/@]+(@)")
_HIDDEN: Final = "***"


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Records made within the block, by this thread or task, are about these."""
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


def now_about(**fields: Any) -> None:
    """The same for the rest of this task: of one request."""
    _about.set({**_about.get(), **{name: value for name, value in fields.items() if value is not None}})


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    found = dict(_about.get())
    found.update({name: getattr(record, name) for name in FIELDS if hasattr(record, name)})
    return {name: found[name] for name in FIELDS if name in found}


class Text(logging.Formatter):
    """For people; what a record is about stands in its sentence."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._hide = Hide(secrets)

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


class Json(logging.Formatter):
    """One object a line: time (UTC, RFC 3339), level, logger, message; ``FIELDS`` where known; exception."""

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
        return json.dumps(line, ensure_ascii=True, default=str)  # nothing in it ends a line


class Hide:
    """Takes secrets out of a text."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        text = _URL_PASSWORD.sub(rf"\1{_HIDDEN}\2", text)
        return _TOKENS.sub(lambda found: f"{found[1] or found[2]}{_HIDDEN}", text)


def configure(level: str, form: LogFormat, secrets: Iterable[str] = (), stream: TextIO | None = None) -> None:
    """All loggers of the process, those of uvicorn, Alembic and ``warnings`` included, to standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Json(secrets) if form == "json" else Text(secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # its lines have whole URLs
