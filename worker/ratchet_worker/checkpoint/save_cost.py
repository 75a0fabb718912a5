"""Estimates how long a job's first save takes."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Final

_SAMPLE: Final = 4 << 20
_SMALL: Final = 8 << 20
"""Bytes that any usable disk writes within two seconds: measuring the disk would cost as much as saving them."""


def expected_seconds(directory: Path, size: int) -> float:
    """Estimate the seconds for writing ``size`` bytes to the disk of ``directory``, by writing a sample there; 0 for up to 8 MiB,
    or after an error."""
    if size <= _SMALL:
        return 0.0
    begun = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(os.urandom(_SAMPLE))  # a disk may compress
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return 0.0
    return (time.monotonic() - begun) * size / _SAMPLE
