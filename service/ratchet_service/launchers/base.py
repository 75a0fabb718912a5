"""The interface of a launcher: it turns a ``LaunchFile`` into running agents on an engine, one per node, and reports their state.

``submit`` may be called again for the same plan after a crash, and must not start a second group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem, RatchetError
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import AgentFile, AttemptResult, LaunchFile
from ratchet_contract.spec.job import JobSpec

_SAVE_FACTOR: Final = 2.0
"""A save during a stop may share the disk with other jobs' saves."""
_STOP_ROOM: Final = 20.0
"""Seconds in addition to the save: the steps until the ranks agree to stop, the last report, the end of the processes."""


class LaunchError(RatchetError):
    """The launcher could not start the attempt's agents, and the caller ends the attempt; ``detail`` says why."""

    code = "launcher-error"


class EngineUnreachable(RatchetError):
    """The engine does not answer, or fails a request that may succeed later. The caller tries again later."""

    code = "engine-unreachable"


class EngineFull(RatchetError):
    """The engine has no capacity for another attempt now; ``detail`` says why. The caller submits again later."""

    code = "engine-queue"


class EngineBusy(EngineUnreachable):
    """The engine has not answered the call yet, or the call was dropped before it began. Not shown to users: the caller repeats
    the call."""


def attempt_name(job_id: str, attempt: int) -> str:
    """Return the name of an attempt, such as ``job-0123456789ab-a0007``: a valid DNS label; the number after ``-a`` is the
    attempt."""
    return f"{job_id}-a{attempt:04d}"


@dataclass(frozen=True)
class AttemptRef:
    """The identity of an attempt (job id and number), with its files and its number of nodes."""

    job_id: str
    attempt: int
    paths: AttemptPaths
    nodes: int = 1

    @property
    def name(self) -> str:
        """The attempt's name, unique over all jobs and attempts. Engines use it as the name of what they run."""
        return attempt_name(self.job_id, self.attempt)


@dataclass(frozen=True)
class LaunchPlan:
    """What a launcher will submit. ``argv``: the agent's command. ``env``: variables that are added to the agent's environment.
    ``secrets``: secret's name -> the variable from which its value is read. ``ranks``: the ranks' commands, for display.
    ``request``: what is sent to the engine, without secret values. ``owner``: of the job; None: not known here."""

    ref: AttemptRef
    launch: LaunchFile
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    ranks: tuple[dict[str, Any], ...] = ()
    request: dict[str, Any] = field(default_factory=dict)
    owner: str | None = None

    def printable(self) -> dict[str, Any]:
        """Return the plan for display and for the attempt's row, without the report token, the spec and secret values."""
        return {
            "name": self.ref.name,
            "agent": {"command": list(self.argv), "env": self.env, "secrets": self.secrets},
            "ranks": list(self.ranks),
            "request": self.request,
            "launch_file": self.launch.model_dump(mode="json", exclude={"report_token", "spec"}),
        }


def longest_stop(spec: JobSpec) -> float:
    """Return the most seconds from the request of a stop to the end of an agent that has to kill its ranks."""
    return spec.policy.stop_grace + _STOP_ROOM


def stop_seconds(launch: LaunchFile) -> float:
    """Return the seconds that an engine must give an agent between the request to end and the kill."""
    most = longest_stop(launch.spec)
    if not launch.save_seconds:
        return most
    return min(most, _SAVE_FACTOR * launch.save_seconds + _STOP_ROOM)


@dataclass(frozen=True)
class NodeState:
    """The state of one node's agent. ``seen``: it has started, now or earlier. ``gone``: it no longer runs. ``agent``: its
    ``agent.json``. ``note``: the engine's message, for display."""

    seen: bool = False
    gone: bool = False
    agent: AgentFile | None = None
    result: AttemptResult | None = None
    note: str | None = None


@dataclass(frozen=True)
class EngineEnd:
    """A termination that the engine reports, such as of a node that it removed. ``node``: the node concerned; None: all nodes."""

    cause: Cause
    message: str
    node: int | None = None


@dataclass(frozen=True)
class AttemptState:
    """The current state of an attempt. ``alive``: a process of it may run or start. ``nodes``: in node order. ``waiting``: why it
    waits in the engine's queue, if it does. ``ends``: causes before their consequences."""

    alive: bool
    nodes: tuple[NodeState, ...] = (NodeState(),)
    waiting: str | None = None
    ends: tuple[EngineEnd, ...] = ()

    @property
    def seen(self) -> bool:
        """True if at least one node's agent has started."""
        return any(node.seen for node in self.nodes)

    @property
    def lost(self) -> tuple[int, ...]:
        """Indices of the nodes whose agent is gone and left no result."""
        return tuple(i for i, node in enumerate(self.nodes) if node.gone and node.result is None)

    @property
    def results(self) -> tuple[AttemptResult, ...]:
        """The results of the agents that have written one, in node order."""
        return tuple(node.result for node in self.nodes if node.result is not None)


class Launcher(Protocol):
    """One engine. Calls do not block forever; any but ``plan`` and ``check`` may raise ``EngineUnreachable``. ``slots``: jobs get
    CPU slots and GPU indices of the service's machine. ``same_files``: a job's nodes see the files of the service's machine at
    the same paths. ``excludes_nodes``: it keeps an attempt off the nodes in ``LaunchFile.exclude_nodes``."""

    kind: str
    max_nodes: int | None
    slots: bool
    same_files: bool
    excludes_nodes: bool

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        """Return warnings and problems. A warning is mostly about a part of the spec that this engine ignores or applies in
        another way. A problem is a part of the spec that this engine cannot honour."""
        ...

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        """Return what to submit for ``launch``, the launch file for node 0. Changes nothing."""
        ...

    def submit(self, plan: LaunchPlan) -> None:
        """Start the attempt's agents, unless they were started before. Once this returns, ``poll`` reports the
        attempt as alive until its end. Raises ``LaunchError`` and ``EngineFull``."""
        ...

    def poll(self, ref: AttemptRef) -> AttemptState:
        """Return the attempt's current state."""
        ...

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """Request the agents to end; their end is not awaited. ``grace``: seconds after which the caller calls ``kill``."""
        ...

    def kill(self, ref: AttemptRef) -> Sequence[str]:
        """Kill everything of the attempt that may be alive, and return names of what was found. The caller repeats the call until
        the result is empty: the attempt is dead and cannot start any more."""
        ...

    def logs(self, ref: AttemptRef, limit: int) -> str:
        """Return the ends of what the agents and the engine printed, at most ``limit`` characters; empty if there is nothing."""
        ...

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> Sequence[str]:
        """Kill the attempts that this service runs on the engine although they are not active, and return their names. ``known``:
        returns which of the given names of attempts are active."""
        ...
