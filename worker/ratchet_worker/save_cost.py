"""What a job's first save is expected to take, before there was one."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Final

_SAMPLE: Final = 4 << 20
_SMALL: Final = 8 << 20
"""Bytes that a disk takes within two seconds, or no job can be saved to it: a trial would cost as much as the save."""


def expected_seconds(directory: Path, size: int) -> float:
    """Seconds that ``size`` bytes take to the disk of ``directory``, by a sample that is written there and synced; nothing of it
    stays. 0 where the disk refuses the sample: the save will tell why."""
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
