"""The launcher ``twin``: two nodes on this machine, each an agent of its own; where asked, each in a network of its own.

As another package would bring it, by the entry point beside it: its directory on the path (``PYTHONPATH``) is its installation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ratchet_contract.paths import HomePaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_service.launchers.base import LaunchPlan
from ratchet_service.launchers.local.launcher import LocalLauncher

NODES = 2


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    behind: list[list[str]] = Field(
        [[], []],
        min_length=NODES,
        max_length=NODES,
        description="Per node, what its agent's command is put behind (an absolute path first): nsenter, which keeps the pid.",
    )
    slots: bool = Field(
        True, description="False: its jobs take no slots of the machine, so that ranks of two nodes share one GPU."
    )
    code: str | None = Field(
        None, description="Where the nodes have the jobs' code, each by its digest; null: they see the service's own."
    )


class TwinLauncher(LocalLauncher):
    kind = "twin"
    max_nodes = NODES

    def __init__(self, home: HomePaths, settings: Settings) -> None:
        super().__init__(home)
        self._settings = settings
        self.slots = settings.slots

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        root, digest = self._settings.code, launch.resolved.code_digest
        if root is not None and digest is not None:
            launch = launch.model_copy(update={"code_dir": f"{root}/{digest}"})
        return super().plan(launch)

    def _start(self, plan: LaunchPlan, node: int, env: dict[str, str]) -> int:
        return super()._start(replace(plan, argv=(*self._settings.behind[node], *plan.argv)), node, env)


def make(home: HomePaths, settings: Mapping[str, Any]) -> TwinLauncher:
    try:
        return TwinLauncher(home, Settings.model_validate(settings))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"the launcher twin: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
