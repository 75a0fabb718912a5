"""Launchers by name. Strings, resolved when asked for, so that an engine's library is imported only where it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Final, cast

from ratchet_contract.paths import HomePaths
from ratchet_service.launchers.base import Launcher

LAUNCHERS: Final[dict[str, str]] = {
    "local": "ratchet_service.launchers.local:make",
}


def make_launcher(kind: str, home: HomePaths) -> Launcher:
    """The launcher named ``kind``. Raises ``ValueError`` for a name that is not in the table."""
    target = LAUNCHERS.get(kind)
    if target is None:
        raise ValueError(f"launcher {kind!r} is not available; there is {', '.join(LAUNCHERS)}")
    module, _, factory = target.partition(":")
    return cast(Launcher, getattr(import_module(module), factory)(home))
