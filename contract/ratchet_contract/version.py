"""Versions that two processes compare when they meet."""

from __future__ import annotations

from typing import Final

RATCHET_VERSION: Final = "0.1.0"
PROTOCOL_VERSION: Final = 1
"""Agent <-> service messages, launch.json, result.json. A different number is refused by either side."""
PROTOCOL_GROWTH: Final = 1
"""How often messages got keys since then (``messages.Grown``). An agent sends them to a service that says it has grown as far."""
PROTOCOL_HEADER: Final = "Ratchet-Protocol"
GROWTH_HEADER: Final = "Ratchet-Protocol-Growth"
"""In every answer of the service, so that a client knows a service of another version, and what is none."""
