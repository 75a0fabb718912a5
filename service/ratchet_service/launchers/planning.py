"""Helpers for launchers to plan an attempt. The public import path of ``ratchet_service.launchers.plan``."""

from ratchet_service.launchers.plan import agent_environment, rank_commands, secret_sources, secret_values

__all__ = [
    "agent_environment",
    "rank_commands",
    "secret_sources",
    "secret_values",
]
