"""The interface of a launcher: it turns a ``LaunchFile`` into running agents on an engine, one per node, and reports their state.

Plan, then submit: ``plan`` changes nothing, and its result is printable. ``submit`` may be called again for the same plan after a
crash and must not start a second group (the key is the name, made of job id and attempt). Later calls address an attempt by its
``AttemptRef``, so a restarted service can supervise attempts that another process launched.

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
    """The launcher could not start the attempt's agents, and a retry without changes would not help; ``detail`` says why."""

    code = "launcher-error"


class EngineUnreachable(RatchetError):
    """The engine does not answer now. The state of its attempts is unknown; the caller must conclude nothing and try again
    later."""

    code = "engine-unreachable"


class EngineFull(RatchetError):
    """The engine has no capacity for another attempt now; ``detail`` says why. The caller submits the attempt again later."""

    code = "engine-queue"


class EngineBusy(EngineUnreachable):
    """The engine was called a moment ago and has not answered yet, or the call was dropped before it began (``engine_thread``).
    This is not reported to users: the caller repeats the call."""


def attempt_name(job_id: str, attempt: int) -> str:
    """Return the name of an attempt, such as ``job-0123456789ab-a0007``: a valid DNS label; the number after ``-a`` is the
    attempt."""
    return f"{job_id}-a{attempt:04d}"


@dataclass(frozen=True)
class AttemptRef:
    """The identity of an attempt (job id and number), with its files and its number of nodes. ``poll``, ``stop``, ``kill`` and
    ``logs`` of a launcher take it, and a ``LaunchPlan`` contains it."""

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
    """What a launcher will submit. ``argv``: the agent's command. ``env``: variables that the launcher adds to the agent's
    environment. ``secrets``: the source of each secret's value, by the secret's name. ``ranks``: the ranks' commands, for
    display. ``request``: the request to the engine (manifests, a batch script), without secret values."""

    ref: AttemptRef
    launch: LaunchFile
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    ranks: tuple[dict[str, Any], ...] = ()
    request: dict[str, Any] = field(default_factory=dict)

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
    """Return the most seconds that a stop can take, from the request to the end of an agent that has to kill its ranks: the
    spec's ``policy.stop_grace`` and a fixed time for ending."""
    return spec.policy.stop_grace + _STOP_ROOM


def stop_seconds(launch: LaunchFile) -> float:
    """Return the seconds that an engine must give an agent between the request to end and the kill. They are computed from the
    longest of the job's last measured saves. They are at most ``longest_stop``, which is also the result if no save was measured
    yet."""
    most = longest_stop(launch.spec)
    if not launch.save_seconds:
        return most
    return min(most, _SAVE_FACTOR * launch.save_seconds + _STOP_ROOM)


@dataclass(frozen=True)
class NodeState:
    """The state of one node's agent. ``seen``: it has started and taken its lock, now or earlier. ``gone``: it has started and is
    known not to run any more. ``agent``: its ``agent.json``. ``result``: its result, once it has written it. ``note``: the
    engine's message about the node, for display."""

    seen: bool = False
    gone: bool = False
    agent: AgentFile | None = None
    result: AttemptResult | None = None
    note: str | None = None


@dataclass(frozen=True)
class EngineEnd:
    """A termination as the engine reports it: why the engine removed a node, or could not start it. ``node``: the node's index;
    None: it concerns all nodes."""

    cause: Cause
    message: str
    node: int | None = None


@dataclass(frozen=True)
class AttemptState:
    """The current state of an attempt.

    ``alive``: some process of the attempt may be running, or may still start. ``nodes``: the state of each node, in node order.
    ``waiting``: why the attempt waits in the engine's queue, None if it does not; while it waits, the launch deadline does not
    run. ``ends``: terminations that the engine reports, in the order in which they happened.
    """

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
        """Indices of the nodes whose agent is gone and left no result: the other nodes would wait for it forever."""
        return tuple(i for i, node in enumerate(self.nodes) if node.gone and node.result is None)

    @property
    def results(self) -> tuple[AttemptResult, ...]:
        """The results of the agents that have written one, in node order."""
        return tuple(node.result for node in self.nodes if node.result is not None)


class Launcher(Protocol):
    """One engine. No call blocks forever: each request to the engine has a deadline. No call raises because an attempt is gone.
    ``plan`` and ``check`` do not contact the engine; any other call may raise ``EngineUnreachable``. If the engine is not this
    machine (``slots`` is false), or an agent host starts its agents, the service makes these other calls one at a time on a
    thread per launcher (``engine_thread``).

    ``max_nodes``: most nodes of a job; None for no limit. ``slots``: jobs get CPU slots and GPU indices of the service's machine.
    ``same_files``: its nodes see the files of the service's machine (interpreters, the user's environment) at the same paths.
    """

    kind: str
    max_nodes: int | None
    slots: bool
    same_files: bool

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        """Return two lists: warnings about parts of the spec that have no effect, or another effect than expected, on this
        engine; and problems, by JSON pointer, for parts that it cannot honour. Pure."""
        ...

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        """Return what to submit for ``launch``, the launch file for node 0. Changes nothing."""
        ...

    def submit(self, plan: LaunchPlan) -> None:
        """Start the attempt's agents, unless they were started before. Once this returns, ``poll`` sees them. Raises
        ``LaunchError`` and ``EngineFull``."""
        ...

    def poll(self, ref: AttemptRef) -> AttemptState:
        """Return the attempt's current state."""
        ...

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """Request the agents to end; does not wait for that. ``grace``: seconds after which the caller kills them (``kill``). An
        engine that kills by itself may do so after a time of its own."""
        ...

    def kill(self, ref: AttemptRef) -> Sequence[str]:
        """Kill everything of the attempt that may be alive, and return names of what was found, for display; does not wait for
        its end. The caller repeats the call until the result is empty. Empty: nothing was found, so the attempt is proved dead,
        or can never start any more."""
        ...

    def logs(self, ref: AttemptRef, limit: int) -> str:
        """Return the ends of what the agents and the engine printed, at most ``limit`` characters altogether; empty if there is
        nothing."""
        ...

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> Sequence[str]:
        """Kill everything that the engine runs under this service's name and that belongs to no active attempt, and return the
        names of the attempts concerned; does not wait for their end. First the engine's attempts are listed. Then, if there are
        any, ``known`` is called with their names; it returns those that have not ended."""
        ...
