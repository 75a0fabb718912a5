"""The Python client (``from ratchet_client import RatchetClient``) and the command line. Heavy imports happen at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratchet_client.resources.client import RatchetClient

__all__ = ["RatchetClient"]


def __getattr__(name: str) -> Any:
    if name == "RatchetClient":
        from ratchet_client.resources.client import RatchetClient

        return RatchetClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
