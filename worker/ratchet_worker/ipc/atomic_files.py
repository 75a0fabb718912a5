"""Atomic file writes: a concurrent reader sees the old file or the new one, never a part."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_RESERVE_BYTES: Final = 128 * 1024


def now() -> str:
    """Return the current UTC time as text in RFC 3339 format, with microseconds and ``Z``."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def reserve(path: Path) -> None:
    """Reserve 128 KiB of disk space for the result file ``path``, in a file next to it. Ignores errors."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".reserve").open("wb") as file:
            # The job itself may fill the disk.
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)


def release(path: Path) -> None:
    """Delete the file with which ``reserve`` holds space for ``path``. Call it immediately before ``path`` is written. Ignores
    errors."""
    with suppress(OSError):
        path.with_suffix(".reserve").unlink()


def log_message(text: str) -> None:
    """Write ``text`` with the time as one line to stderr, which is the agent's log. Ignores errors."""
    print_to_log(f"{now()} ratchet agent: {text}")


def print_to_log(text: str) -> None:
    """Print ``text`` to ``sys.stderr``, and ignore any error."""
    # The log may be on a full disk, and a script may have closed or replaced the stream.
    with suppress(Exception):
        print(text, file=sys.stderr, flush=True)
