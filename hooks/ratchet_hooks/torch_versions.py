"""The versions of torch that Ratchet's tests run on. Does not import torch, so that the service can use it."""

from __future__ import annotations

import re
from typing import Final

OLDEST: Final = "2.9"
TESTED: Final = ("2.9", "2.11", "2.13", "2.15")


def untested(version: str) -> str | None:
    """Return a sentence for a version of torch, such as ``2.13.1+cu130``, that is not tested; None for others."""
    release = re.match(r"\d+\.\d+", version)
    if release is not None and release[0] in TESTED:
        return None
    return f"torch {version} is not tested with this Ratchet: its tests run on torch {', '.join(TESTED)}"
