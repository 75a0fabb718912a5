"""Job ids: ``job-`` and 12 characters of base 32 (Crockford), the first 9 a time, so that ids sort by creation."""

from __future__ import annotations

import secrets
import time
from typing import Final

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_EPOCH_MS: Final = 1_704_067_200_000  # 2024-01-01T00:00:00Z


def new_job_id() -> str:
    """45 bits of milliseconds since 2024 and 15 random bits."""
    number = ((time.time_ns() // 1_000_000 - _EPOCH_MS) << 15) | secrets.randbits(15)
    return "job-" + "".join(_ALPHABET[(number >> shift) & 31] for shift in range(55, -1, -5))
