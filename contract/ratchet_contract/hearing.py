"""How late an agent may hear of a wish, which comes with the answer to a report: what agent and reconciler reckon with alike."""

from __future__ import annotations

from typing import Final

LONGEST: Final = 10.0
"""Seconds that an agent keeps figures back at the most, however much the service has to do."""


def hears_within(stop_grace: float) -> float:
    """Seconds. Whoever has to stop within less (``policy.stop_grace``) asks more often, four times in it."""
    return min(LONGEST, stop_grace / 4)
