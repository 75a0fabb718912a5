"""What a launcher is: it turns a ``LaunchFile`` into running agents on some engine, one per node, and says what became of them.

Plan, then submit: ``plan`` is pure and printable; ``submit`` may be called again for the same plan after a crash and must
not start a second group (the name, job id and epoch, is the key). Everything is addressed by ``AttemptRef``, so a service
that was killed and started again can look after attempts that another process launched.

Where an engine keeps a queue of its own, an attempt waits there: ``AttemptState.waiting``. Ratchet keeps slots for launchers
that have none (``slots``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ratchet_contract.api import Warning_
from ratchet_contract.errors import FieldProblem, RatchetError
from ratchet_contract.messages import AgentFile, AttemptResult, LaunchFile
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_contract.spec import JobSpec

_SAVE_FACTOR: Final = 2.0
"""A save under a stop meets a disk that others save to at the same moment."""
_STOP_ROOM: Final = 20.0
"""Seconds beside the save: the steps until the ranks have agreed, the last report, the processes' end."""


class LaunchError(RatchetError):
    """The launcher could not start the group, and trying again as it is would not help; ``detail`` says why."""

    code = "launcher-error"


class EngineUnreachable(RatchetError):
    """The engine does not answer now. Nothing is known of its attempts meanwhile, and nothing is concluded from that."""

    code = "engine-unreachable"


class EngineFull(RatchetError):
    """The engine has no room for one group more, and will have: it is submitted again until then; ``detail`` says why."""

    code = "engine-queue"


class EngineBusy(EngineUnreachable):
    """The engine was asked a moment ago and has not answered yet. Nobody need be told: whoever asks again gets the answer."""


def attempt_name(job_id: str, epoch: int) -> str:
    """``job-0123456789ab-a0007``: a DNS label, and what follows ``-a`` is the epoch."""
    return f"{job_id}-a{epoch:04d}"


@dataclass(frozen=True)
class AttemptRef:
    """Which attempt, on how many nodes, and where its files are."""

    job_id: str
    epoch: int
    paths: AttemptPaths
    nodes: int = 1

    @property
    def name(self) -> str:
        """Unique over all jobs and attempts; engines use it as the name of what they run."""
        return attempt_name(self.job_id, self.epoch)


@dataclass(frozen=True)
class LaunchPlan:
    """A launcher's request. ``env`` is what the launcher adds to the agent's environment; ``secrets`` maps a name to where its
    value is taken from; ``request`` is what the engine is asked for (manifests, a batch script), without secret values."""

    ref: AttemptRef
    launch: LaunchFile
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    ranks: tuple[dict[str, Any], ...] = ()
    request: dict[str, Any] = field(default_factory=dict)

    def printable(self) -> dict[str, Any]:
        """For people and for the row of the attempt: no token, no secret value."""
        return {
            "name": self.ref.name,
            "agent": {"command": list(self.argv), "env": self.env, "secrets": self.secrets},
            "ranks": list(self.ranks),
            "request": self.request,
            "launch_file": self.launch.model_dump(mode="json", exclude={"report_token", "spec"}),
        }


def longest_stop(spec: JobSpec) -> float:
    """Seconds from a stop's begin until an agent is gone that has to end its ranks by force."""
    return spec.policy.stop_grace + _STOP_ROOM


def stop_seconds(launch: LaunchFile) -> float:
    """The notice, in seconds, that an engine must give an agent before it kills it: from the job's own measured saves, at most
    ``policy.stop_grace`` (after which the agent itself kills its ranks) and what its end takes. Without a save yet, just that."""
    most = longest_stop(launch.spec)
    if not launch.save_seconds:
        return most
    return min(most, _SAVE_FACTOR * launch.save_seconds + _STOP_ROOM)


@dataclass(frozen=True)
class NodeState:
    """One node's agent now. ``seen``: it got as far as taking its lock, now or earlier; ``gone``: it began, and is known not to
    run any more; ``result`` is there once it has written its last word; ``note``: what the engine says of the node, for
    people."""

    seen: bool = False
    gone: bool = False
    agent: AgentFile | None = None
    result: AttemptResult | None = None
    note: str | None = None


@dataclass(frozen=True)
class EngineEnd:
    """What the engine itself knows of an end: why it took a node away, or why it started none. ``node``: whose; None: all."""

    cause: Cause
    message: str
    node: int | None = None


@dataclass(frozen=True)
class AttemptState:
    """What is true of an attempt now.

    ``alive``: something of it may be running, or may still start. ``waiting``: it waits in the engine's queue, and why; the
    launch deadline does not run meanwhile. ``ends``: what the engine knows of an end, in the order that it happened.
    """

    alive: bool
    nodes: tuple[NodeState, ...] = (NodeState(),)
    waiting: str | None = None
    ends: tuple[EngineEnd, ...] = ()

    @property
    def seen(self) -> bool:
        """Has any agent begun?"""
        return any(node.seen for node in self.nodes)

    @property
    def lost(self) -> tuple[int, ...]:
        """Nodes whose agent is gone without a last word: the others wait for it in vain."""
        return tuple(i for i, node in enumerate(self.nodes) if node.gone and node.result is None)

    @property
    def results(self) -> tuple[AttemptResult, ...]:
        return tuple(node.result for node in self.nodes if node.result is not None)


class Launcher(Protocol):
    """One engine. All calls end, with a deadline for each question to the engine; none raises for an attempt that is gone.
    ``plan`` and ``check`` ask no engine; any other may raise ``EngineUnreachable``. Where the engine is not this machine
    (``slots``), a service makes these others on a thread of the launcher's own, one at a time (``apart``).

    ``max_nodes``: None without a limit. ``slots``: jobs get CPU slots and GPU indices of the service's machine. ``same_files``:
    its nodes see the service's machine's files (interpreters, the user's environment) at the same paths.
    """

    kind: str
    max_nodes: int | None
    slots: bool
    same_files: bool

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        """What this engine cannot honour of a spec, by JSON pointer, and what it honours without effect. Pure."""
        ...

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        """The request for ``launch`` (as node 0 sees it). Pure."""
        ...

    def submit(self, plan: LaunchPlan) -> None:
        """Start the group unless it was started before; from its return on ``poll`` sees it. Raises ``LaunchError`` and
        ``EngineFull``."""
        ...

    def poll(self, ref: AttemptRef) -> AttemptState:
        """Look at the group."""
        ...

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """Ask the agents to end. Engines that end by force themselves do so after ``grace`` seconds; the caller kills."""
        ...

    def kill(self, ref: AttemptRef) -> Sequence[str]:
        """End by force everything of the attempt that may be alive, and name it for people. Empty: it is proved dead, or fenced
        for good. Called again until then."""
        ...

    def logs(self, ref: AttemptRef, limit: int) -> str:
        """The end, ``limit`` characters, of what agents and engine printed; empty when there is nothing."""
        ...

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> Sequence[str]:
        """End what runs under this service's name and belongs to no attempt: the engine is asked first for what it has, then
        ``known`` tells which of these names a row knows. Returns the names that were ended."""
        ...
