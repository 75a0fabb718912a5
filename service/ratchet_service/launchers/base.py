"""The interface of a launcher: it turns a ``LaunchFile`` into running agents on an engine, one per node, and reports their state.

Plan, then submit: ``plan`` is pure and its result printable. ``submit`` may be called again for the same plan after a crash and
must not start a second group (the key is the name, made of job id and attempt). Everything is addressed by ``AttemptRef``, so a
restarted service can supervise attempts that another process launched.

Where an engine has a queue of its own, an attempt waits there (``AttemptState.waiting``). For launchers without a queue
(``slots``), Ratchet manages slots.
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
    """The launcher could not start the group, and retrying without changes would not help; ``detail`` says why."""

    code = "launcher-error"


class EngineUnreachable(RatchetError):
    """The engine does not answer now. The state of its attempts is unknown meanwhile, and nothing is concluded from that."""

    code = "engine-unreachable"


class EngineFull(RatchetError):
    """The engine has no capacity for another group at present. The group is submitted again until it has; ``detail`` says why."""

    code = "engine-queue"


class EngineBusy(EngineUnreachable):
    """The engine was called a moment ago and has not answered yet. This need not be reported: calling again returns the
    answer."""


def attempt_name(job_id: str, attempt: int) -> str:
    """``job-0123456789ab-a0007``: a DNS label, and what follows ``-a`` is the attempt."""
    return f"{job_id}-a{attempt:04d}"


@dataclass(frozen=True)
class AttemptRef:
    """An attempt's identity, number of nodes and files."""

    job_id: str
    attempt: int
    paths: AttemptPaths
    nodes: int = 1

    @property
    def name(self) -> str:
        """Unique over all jobs and attempts; engines use it as the name of what they run."""
        return attempt_name(self.job_id, self.attempt)


@dataclass(frozen=True)
class LaunchPlan:
    """What a launcher will submit. ``env``: variables that the launcher adds to the agent's environment; ``secrets``: the source
    of each secret's value, by the secret's name; ``request``: the request to the engine (manifests, a batch script), without
    secret values."""

    ref: AttemptRef
    launch: LaunchFile
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    ranks: tuple[dict[str, Any], ...] = ()
    request: dict[str, Any] = field(default_factory=dict)

    def printable(self) -> dict[str, Any]:
        """The plan for display and for the attempt's row, without the token and secret values."""
        return {
            "name": self.ref.name,
            "agent": {"command": list(self.argv), "env": self.env, "secrets": self.secrets},
            "ranks": list(self.ranks),
            "request": self.request,
            "launch_file": self.launch.model_dump(mode="json", exclude={"report_token", "spec"}),
        }


def longest_stop(spec: JobSpec) -> float:
    """Seconds from the start of a stop to the end of an agent that has to kill its ranks."""
    return spec.policy.stop_grace + _STOP_ROOM


def stop_seconds(launch: LaunchFile) -> float:
    """The notice, in seconds, that an engine must give an agent before it kills it. It is computed from the job's measured saves
    and is at most ``longest_stop``: ``policy.stop_grace``, after which the agent itself kills its ranks, and the time it takes to
    end. If no save was measured yet, it is ``longest_stop``."""
    most = longest_stop(launch.spec)
    if not launch.save_seconds:
        return most
    return min(most, _SAVE_FACTOR * launch.save_seconds + _STOP_ROOM)


@dataclass(frozen=True)
class NodeState:
    """The state of one node's agent. ``seen``: it has started and taken its lock, now or earlier; ``gone``: it has started and is
    known not to run any more; ``result``: set once it has written its result; ``note``: the engine's message about the node, for
    display."""

    seen: bool = False
    gone: bool = False
    agent: AgentFile | None = None
    result: AttemptResult | None = None
    note: str | None = None


@dataclass(frozen=True)
class EngineEnd:
    """A termination as the engine reports it: why it removed a node, or started none. ``node``: the node's index; None: all
    nodes."""

    cause: Cause
    message: str
    node: int | None = None


@dataclass(frozen=True)
class AttemptState:
    """The current state of an attempt.

    ``alive``: a part of it may be running, or may still start. ``waiting``: why it waits in the engine's queue, if it does; the
    launch deadline does not run meanwhile. ``ends``: terminations that the engine reports, in the order in which they happened.
    """

    alive: bool
    nodes: tuple[NodeState, ...] = (NodeState(),)
    waiting: str | None = None
    ends: tuple[EngineEnd, ...] = ()

    @property
    def seen(self) -> bool:
        """True if any agent has started."""
        return any(node.seen for node in self.nodes)

    @property
    def lost(self) -> tuple[int, ...]:
        """Nodes whose agent is gone and left no result: the other nodes wait for it in vain."""
        return tuple(i for i, node in enumerate(self.nodes) if node.gone and node.result is None)

    @property
    def results(self) -> tuple[AttemptResult, ...]:
        return tuple(node.result for node in self.nodes if node.result is not None)


class Launcher(Protocol):
    """One engine. Every call ends: each request to the engine has a deadline. No call raises for an attempt that is gone.
    ``plan`` and ``check`` do not contact the engine; any other call may raise ``EngineUnreachable``. If the engine is not this
    machine (``slots`` is false), the service makes these other calls one at a time on a thread per launcher (``engine_thread``).

    ``max_nodes``: None for no limit. ``slots``: jobs get CPU slots and GPU indices of the service's machine. ``same_files``: its
    nodes see the files of the service's machine (interpreters, the user's environment) at the same paths.
    """

    kind: str
    max_nodes: int | None
    slots: bool
    same_files: bool

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        """Problems, by JSON pointer, for parts of the spec that this engine cannot honour, and warnings for parts without effect.
        Pure."""
        ...

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        """The request for ``launch`` (as node 0 sees it). Pure."""
        ...

    def submit(self, plan: LaunchPlan) -> None:
        """Start the group unless it was started before. Once this returns, ``poll`` sees the group. Raises ``LaunchError`` and
        ``EngineFull``."""
        ...

    def poll(self, ref: AttemptRef) -> AttemptState:
        """The group's current state."""
        ...

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """Ask the agents to end. Engines that kill by themselves do so after ``grace`` seconds; otherwise the caller kills."""
        ...

    def kill(self, ref: AttemptRef) -> Sequence[str]:
        """Kill everything of the attempt that may be alive, and return its names for display. Empty: the attempt is proved dead,
        or permanently fenced. The caller repeats the call until then."""
        ...

    def logs(self, ref: AttemptRef, limit: int) -> str:
        """The last ``limit`` characters that agents and engine printed; empty if there are none."""
        ...

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> Sequence[str]:
        """End everything that runs under this service's name and belongs to no attempt. The engine's names are listed first, then
        ``known`` returns those that have a row in the database. Return the names that were ended."""
        ...
