"""What a launcher is: it turns a ``LaunchFile`` into a running agent on some engine, and says what became of it.

Plan, then submit: ``plan`` is pure and printable; ``submit`` may be called again for the same plan after a crash and must
not start a second agent (the name, job id and epoch, is the key). Everything is addressed by ``AttemptRef``, so a service
that was killed and started again can look after attempts that another process launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ratchet_contract.errors import RatchetError
from ratchet_contract.messages import AgentFile, AttemptResult, LaunchFile
from ratchet_contract.paths import AttemptPaths


class LaunchError(RatchetError):
    """The launcher could not start the agent; ``detail`` says why."""

    code = "launcher-error"


@dataclass(frozen=True)
class AttemptRef:
    """Which attempt, and where its files are."""

    job_id: str
    epoch: int
    paths: AttemptPaths

    @property
    def name(self) -> str:
        """Unique over all jobs and attempts; engines use it as the name of what they run."""
        return f"{self.job_id}-a{self.epoch:04d}"


@dataclass(frozen=True)
class LaunchPlan:
    """A launcher's request. ``env`` is what the launcher adds; ``secrets`` maps a name to the variable it is read from."""

    ref: AttemptRef
    launch: LaunchFile
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    ranks: tuple[dict[str, Any], ...] = ()

    def printable(self) -> dict[str, Any]:
        """For people and for the row of the attempt: no token, no secret value."""
        return {
            "name": self.ref.name,
            "agent": {"command": list(self.argv), "env": self.env, "secrets": self.secrets},
            "ranks": list(self.ranks),
            "launch_file": self.launch.model_dump(mode="json", exclude={"report_token", "spec"}),
        }


@dataclass(frozen=True)
class NodeState:
    """What is true of an attempt's agent now.

    ``alive``: a process of it exists (for a started agent: its lock is held). ``seen``: the agent got as far as taking its
    lock, now or earlier. ``result`` is there once the agent has written its last word.
    """

    alive: bool
    seen: bool
    agent: AgentFile | None = None
    result: AttemptResult | None = None


class Launcher(Protocol):
    """One engine. All calls return at once; none raises for an attempt that is gone, unless it says so."""

    kind: str

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        """The request for ``launch``. Pure."""
        ...

    def submit(self, plan: LaunchPlan) -> None:
        """Start the agent unless it was started before. Raises ``LaunchError``."""
        ...

    def poll(self, ref: AttemptRef) -> NodeState:
        """Look at the agent."""
        ...

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """Ask the agent to end. Engines that end by force themselves do so after ``grace`` seconds; the caller sweeps."""
        ...

    def sweep(self, ref: AttemptRef) -> list[int]:
        """End by force everything of the attempt that is still alive; the pids found. Empty: it is proved dead."""
        ...
