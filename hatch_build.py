"""What a wheel of ratchet-train requires beside what pyproject.toml says: ratchet-hooks of the same version, from ``hooks/``.

An editable installation has that directory on its path and requires nothing, so that a checkout needs no other wheel.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RequireHooks(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["dependencies"].append(f"ratchet-hooks=={self.metadata.version}")
