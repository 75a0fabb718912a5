"""The local launcher where an agent host starts the agents: a process of its own, in a container of its own, that has no database
and outlives this one. It is asked over a socket in the run directory, which both see at the same path.

Files and locks are looked at from here: a lock is the kernel's, whichever container its holder is in. Processes are not; what
takes them is asked of the host. Several reconcilers may ask, also of another version than the host's: what an agent is to do
stands in ``launch.json`` alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ratchet_contract.phases import Cause
from ratchet_service.launchers import files
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineEnd,
    EngineUnreachable,
    LaunchError,
    LaunchPlan,
)
from ratchet_service.launchers.local import LocalLauncher

SOCKET: Final = "agent-host.sock"
MOST_BYTES: Final = 1 << 20
"""Of a question or an answer: a line of JSON."""
_SECONDS: Final = 30.0
"""For an answer. The caller waits for less, on a thread of its own (``Apart``)."""
_WITH_ITS_HOST: Final = (
    "its agent was ended together with its agent host, by force or with the machine: the newest checkpoint counts"
)


class Question(BaseModel):
    """``what``: ``look`` at an attempt, ``start`` its agents, ``stop`` or ``kill`` them; ``running``: which attempts have
    processes; ``sweep``: end those of ``names``; ``ping``."""

    model_config = ConfigDict(extra="ignore")
    what: Literal["ping", "look", "start", "stop", "kill", "running", "sweep"]
    job_id: str = ""
    epoch: int = 0
    names: list[str] = Field(default_factory=list)


class Answer(BaseModel):
    """``away``: nothing was done, and why; ``refused``: trying again would not help. ``alive``: the attempt has a process;
    ``own``: this very host has started its agents. ``names``: of attempts, or of what was killed."""

    model_config = ConfigDict(extra="ignore")
    away: str = ""
    refused: str = ""
    alive: bool = False
    own: bool = True
    names: list[str] = Field(default_factory=list)


M = TypeVar("M", Question, Answer)


def address(folder: int) -> str:
    """Of the socket in the open directory: a path of it could be too long (108 bytes)."""
    return f"/proc/self/fd/{folder}/{SOCKET}"


def read_line(connection: socket.socket, kind: type[M]) -> M:
    """Raises ``OSError``, and ``ValueError`` for what is no such message."""
    with connection.makefile("rb") as stream:
        return kind.model_validate_json(stream.readline(MOST_BYTES))


def send_line(connection: socket.socket, message: BaseModel) -> None:
    """Raises ``OSError``."""
    connection.sendall(message.model_dump_json().encode() + b"\n")


def ask(home: Path, question: Question) -> Answer:
    """Raises ``EngineUnreachable`` where no host answers, and ``LaunchError`` for what it refuses."""
    folder = -1
    try:
        folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SECONDS)
            connection.connect(address(folder))
            send_line(connection, question)
            answer = read_line(connection, Answer)
    except (OSError, ValidationError) as error:
        said = error.strerror or str(error) if isinstance(error, OSError) else "its answer is none"
        raise EngineUnreachable(
            f"the agent host of {home} does not answer ({said}): `ratchet agent-host` starts it, in the container `agents` where "
            "docker-compose.yml is used"
        ) from None
    finally:
        if folder >= 0:
            os.close(folder)
    if answer.away:
        raise EngineUnreachable(answer.away)
    if answer.refused:
        raise LaunchError(answer.refused)
    return answer


class HostedLauncher(LocalLauncher):
    """See the module. Its calls may wait for the host: a service makes them ``Apart``."""

    same_files = False

    def submit(self, plan: LaunchPlan) -> None:
        if not plan.ref.paths.agent_file.exists():
            self._write(plan)
            self._ask("start", plan.ref)

    def poll(self, ref: AttemptRef) -> AttemptState:
        nodes = files.node_states(ref, gone=lambda node: not files.lock_is_held(ref.paths.node(node).lock_file))
        if any(node.seen and not node.gone for node in nodes):
            return AttemptState(True, nodes)
        now = self._ask("look", ref)
        lost = not (now.alive or now.own or all(node.result for node in nodes))
        return AttemptState(now.alive, nodes, ends=(EngineEnd(Cause.NODE_LOST, _WITH_ITS_HOST),) if lost else ())

    def stop(self, ref: AttemptRef, grace: float) -> None:
        self._ask("stop", ref)

    def kill(self, ref: AttemptRef) -> list[str]:
        return self._ask("kill", ref).names

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> list[str]:
        found = ask(self._home.home, Question(what="running")).names
        orphans = sorted(set(found) - set(known(found))) if found else []
        return ask(self._home.home, Question(what="sweep", names=orphans)).names if orphans else []

    def _ask(self, what: Literal["look", "start", "stop", "kill"], ref: AttemptRef) -> Answer:
        return ask(self._home.home, Question(what=what, job_id=ref.job_id, epoch=ref.epoch))
