"""Lines for the log of an agent or a rank, which is its stderr, and the times in them and in messages."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache


def now() -> str:
    """Return the current UTC time as text in RFC 3339 format, with microseconds and ``Z``."""
    second, microseconds = divmod(time.time_ns() // 1000, 1_000_000)
    return f"{_to_the_second(second)}.{microseconds:06d}Z"


@lru_cache(maxsize=1)
def _to_the_second(second: int) -> str:
    """Return the UTC time of a Unix time. Cached: a step may make many messages."""
    return datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")


def log_message(text: str) -> None:
    """Write ``text`` with the time as one line to stderr, which is the agent's log. Ignores errors."""
    print_to_log(f"{now()} ratchet agent: {text}")


def print_to_log(text: str) -> None:
    """Print ``text`` to ``sys.stderr``, and ignore any error."""
    # The log may be on a full disk, and a script may have closed or replaced the stream.
    with suppress(Exception):
        print(text, file=sys.stderr, flush=True)
