"""Parses ``--standby``: how many agents are parked for later attempts, for how long, and how large they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from pydantic import TypeAdapter

from ratchet_contract.spec.types import Size, size_in_bytes


@dataclass(frozen=True)
class StandbyBounds:
    """StandbyBounds of parked agents: their number (0: none is parked), the seconds that one waits after the last attempt that it would
    fit, and the bytes of memory that one, with its fork server, may use (resident)."""

    processes: int = 2
    seconds: float = 1800.0
    memory: int = 1 << 30


OFF: Final = StandbyBounds(0)


def parse(text: str) -> StandbyBounds:
    """Return the bounds in the value of ``--standby``. Raises ``ValueError`` with a message for users."""
    if text == "off":
        return OFF
    bounds = StandbyBounds()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        kinds: dict[str, Callable[[str], float]] = {"processes": int, "seconds": float, "memory": _size}
        try:
            changed = kinds[name](value)
        except (KeyError, ValueError):
            changed = -1
        if not 0 < changed < 1 << 50:
            raise ValueError(
                f"{part!r} is not a bound of parked agents: off, or processes=NUMBER, seconds=NUMBER, memory=SIZE "
                "(like 1Gi), separated by commas"
            )
        bounds = replace(bounds, **{name: changed})
    return bounds


def _size(text: str) -> int:
    """Return the bytes of a size like ``1Gi``. Raises ``ValueError``."""
    return size_in_bytes(TypeAdapter[str](Size).validate_python(text))
