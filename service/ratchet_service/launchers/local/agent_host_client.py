"""The local launcher for a service whose agents are started by an agent host, a separate process that may outlive the service.
Requests to the host go over a socket in the run directory. Files and locks are checked in this process. The host finds and
signals the processes, since they may not be visible here."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ratchet_contract.phases import Cause
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineEnd,
    EngineUnreachable,
    LaunchError,
    LaunchPlan,
)
from ratchet_service.launchers.local.launcher import LocalLauncher

SOCKET: Final = "agent-host.sock"
MAX_MESSAGE_BYTES: Final = 1 << 20
"""The most bytes of a question or an answer, which is one line of JSON."""
_TIMEOUT_SECONDS: Final = 30.0
"""Time limit of each operation on the socket. The caller waits for less, since the request runs on a thread of its own
(``ThreadedLauncher``)."""
_ENDED_WITH_HOST: Final = (
    "its agent was ended together with its agent host, by force or with the machine: the newest checkpoint counts"
)


class Question(BaseModel):
    """A request to the agent host. Requests about one attempt: ``look`` for its processes, ``start``, ``stop``, ``kill``.
    Requests about all attempts: ``running`` returns names, ``sweep`` kills those in ``names``. ``ping`` only checks that the host
    answers."""

    model_config = ConfigDict(extra="ignore")
    what: Literal["ping", "look", "start", "stop", "kill", "running", "sweep"]
    job_id: str = ""
    attempt: int = 0
    names: list[str] = Field(default_factory=list)


class Answer(BaseModel):
    """The agent host's answer. ``away``: why the host could not act now; a later request may succeed. ``refused``: why the
    request failed; the caller does not repeat it. ``alive``: a process of the attempt may be alive. ``own``: this host process
    started the attempt's agents. ``names``: those found or killed."""

    model_config = ConfigDict(extra="ignore")
    away: str = ""
    refused: str = ""
    alive: bool = False
    own: bool = True
    names: list[str] = Field(default_factory=list)


M = TypeVar("M", Question, Answer)


def socket_address(directory_fd: int) -> str:
    """Return the address of the agent host's socket. It names the directory by its descriptor, since the directory's path may be
    too long."""
    return f"/proc/self/fd/{directory_fd}/{SOCKET}"


def read_line(connection: socket.socket, kind: type[M]) -> M:
    """Receive one message. Raises ``OSError``, and ``ValueError`` if it is not valid as ``kind``."""
    with connection.makefile("rb") as stream:
        return kind.model_validate_json(stream.readline(MAX_MESSAGE_BYTES))


def send_line(connection: socket.socket, message: BaseModel) -> None:
    """Send one message. Raises ``OSError``."""
    connection.sendall(message.model_dump_json().encode() + b"\n")


def send_request(home: Path, request: Question) -> Answer:
    """Send ``request`` to the run directory's agent host and return its answer. Raises ``EngineUnreachable``, and ``LaunchError``
    if the host refuses."""
    directory_fd = -1
    try:
        directory_fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_SECONDS)
            connection.connect(socket_address(directory_fd))
            send_line(connection, request)
            answer = read_line(connection, Answer)
    except (OSError, ValidationError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else "its response is not valid"
        raise EngineUnreachable(
            f"the agent host of {home} does not answer ({reason}): `ratchet agent-host` starts it, in the "
            "container `agents` where "
            "docker-compose.yml is used"
        ) from None
    finally:
        if directory_fd >= 0:
            os.close(directory_fd)
    if answer.away:
        raise EngineUnreachable(answer.away)
    if answer.refused:
        raise LaunchError(answer.refused)
    return answer


class HostedLauncher(LocalLauncher):
    """The local launcher whose agents an agent host starts. Its calls may wait for the host."""

    same_files = False
    excludes_nodes = False

    def submit(self, plan: LaunchPlan) -> None:
        """Write ``launch.json`` and request the host to start the agents, unless an agent has started already. Raises
        ``LaunchError`` and ``EngineUnreachable``."""
        if not plan.ref.paths.agent_file.exists():
            self._write_launch_file(plan)
            self._request("start", plan.ref)

    def poll(self, ref: AttemptRef) -> AttemptState:
        """Return the attempt's state, from files and locks, and from the host if no started agent holds its lock. Raises as
        ``send_request``."""
        nodes = attempt_files.node_states(
            ref, gone=lambda node: not attempt_files.lock_is_held(ref.paths.node(node).lock_file)
        )
        if any(node.seen and not node.gone for node in nodes):
            return AttemptState(True, nodes)
        answer = self._request("look", ref)
        lost = not (answer.alive or answer.own or all(node.result for node in nodes))
        return AttemptState(answer.alive, nodes, ends=(EngineEnd(Cause.NODE_LOST, _ENDED_WITH_HOST),) if lost else ())

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """Request the host to send SIGTERM to the agents; ``grace`` is not used. Raises as ``send_request``."""
        self._request("stop", ref)

    def kill(self, ref: AttemptRef) -> list[str]:
        """Request the host to kill the attempt's processes, and return names of those found. Raises as ``send_request``."""
        return self._request("kill", ref).names

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> list[str]:
        """Request the host to kill the running attempts that ``known`` does not return, and return the names of the killed
        attempts."""
        found = send_request(self._home.home, Question(what="running")).names
        orphans = sorted(set(found) - set(known(found))) if found else []
        return send_request(self._home.home, Question(what="sweep", names=orphans)).names if orphans else []

    def _request(self, operation: Literal["look", "start", "stop", "kill"], ref: AttemptRef) -> Answer:
        """Send a request about one attempt. Raises as ``send_request``."""
        return send_request(self._home.home, Question(what=operation, job_id=ref.job_id, attempt=ref.attempt))
