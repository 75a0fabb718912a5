"""The launcher that runs jobs as processes of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet_contract.paths import HomePaths
from ratchet_service.config.standby_bounds import OFF, StandbyBounds
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox
from ratchet_service.launchers.base import Launcher
from ratchet_service.launchers.engine_thread import ThreadedLauncher
from ratchet_service.launchers.local.agent_host_client import HostedLauncher
from ratchet_service.launchers.local.launcher import LocalLauncher

__all__ = ["make"]


def make(
    home: HomePaths, settings: Mapping[str, Any], sandbox: Sandbox = NO_SANDBOX, standby: StandbyBounds = OFF
) -> Launcher:
    """Return the local launcher. With ``agent_host: true`` a separate process starts its agents, and none is parked. Raises
    ``ValueError``."""
    hosted = settings.get("agent_host", False)
    further = [str(name) for name in settings if name != "agent_host"]
    if further or not isinstance(hosted, bool):
        given = ", ".join(further) or f"agent_host: {hosted!r}"
        raise ValueError(f"the local launcher has only the setting agent_host, true or false, not {given}")
    if not hosted:
        return LocalLauncher(home, sandbox=sandbox, standby=standby)
    if sandbox.user is not None:
        raise ValueError("local jobs run as the user of their agent host (agent_host: true): omit --run-as")
    return ThreadedLauncher(HostedLauncher(home))
