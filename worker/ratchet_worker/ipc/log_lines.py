"""Lines for the log of an agent or a rank, which is its stderr, and the times in them and in messages."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import UTC, datetime


def now() -> str:
    """Return the current UTC time as text in RFC 3339 format, with microseconds and ``Z``."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def log_message(text: str) -> None:
    """Write ``text`` with the time as one line to stderr, which is the agent's log. Ignores errors."""
    print_to_log(f"{now()} ratchet agent: {text}")


def print_to_log(text: str) -> None:
    """Print ``text`` to ``sys.stderr``, and ignore any error."""
    # The log may be on a full disk, and a script may have closed or replaced the stream.
    with suppress(Exception):
        print(text, file=sys.stderr, flush=True)
