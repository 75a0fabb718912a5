"""Parses ``--standby``: how many agents are parked for later attempts, for how long, and how large they may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ratchet_contract.spec.types import Seconds, Size, size_in_bytes


@dataclass(frozen=True)
class StandbyBounds:
    """Bounds of parked agents: their number (0: none is parked), the seconds that one waits after the last attempt of its kind,
    and the bytes of memory that one, with its fork server, may use (resident)."""

    processes: int = 4
    seconds: float = 900.0
    memory: int = 1 << 30


OFF: Final = StandbyBounds(0)
ON: Final = StandbyBounds()
_NAMED: Final = {"off": OFF, "on": ON}
_MOST_PROCESSES: Final = 1000


class _Given(BaseModel):
    model_config = ConfigDict(extra="forbid")
    processes: int = Field(StandbyBounds.processes, ge=1, le=_MOST_PROCESSES)
    seconds: Seconds = StandbyBounds.seconds
    memory: Size = "1Gi"


def parse(text: str) -> StandbyBounds:
    """Return the bounds in the value of ``--standby``. Raises ``ValueError`` with a message for users."""
    if text in _NAMED:
        return _NAMED[text]
    parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    try:
        given = _Given.model_validate({name: value for name, _, value in parts})
    except ValidationError as error:
        raise ValueError(
            f"{text!r} does not bound parked agents, because of {error.errors()[0]['loc'][0]!r}: off, on, or "
            f"processes=NUMBER (1 to {_MOST_PROCESSES}), seconds=DURATION (like 900 or 15m), memory=SIZE (like 1Gi), separated "
            "by commas"
        ) from None
    return StandbyBounds(given.processes, given.seconds, size_in_bytes(given.memory))
