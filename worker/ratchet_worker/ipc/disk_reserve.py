"""Disk space for a result file, held from the start, since the job itself may fill the disk."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_RESERVE_BYTES: Final = 128 * 1024


def reserve(path: Path) -> None:
    """Reserve 128 KiB of disk space for the result file ``path``, in a file next to it. Ignores errors."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".reserve").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)


def release(path: Path) -> None:
    """Delete the file with which ``reserve`` holds space for ``path``. Call it immediately before ``path`` is written. Ignores
    errors."""
    with suppress(OSError):
        path.with_suffix(".reserve").unlink()
