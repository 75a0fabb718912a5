"""``ratchet agent-host``: starts the agents of local jobs for a reconciler elsewhere, and nothing else.

It has no database, so that jobs, which run as its user and beside it, find nothing of the service's; a reconciler may be stopped
or replaced without it. At SIGTERM it asks its agents to stop: each saves a checkpoint, and its attempt ends as preempted. It goes
once they have ended. In a container everything that is left ends with it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ratchet_contract.paths import HomePaths, is_job_id
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.confined import OWN
from ratchet_service.interpreters import Interpreters
from ratchet_service.launch_files import read_launch_file
from ratchet_service.launchers.agent_host_client import Answer, Question, address, read_line, send_line
from ratchet_service.launchers.base import AttemptRef, LaunchError
from ratchet_service.launchers.local import LocalLauncher
from ratchet_service.listening import StartError
from ratchet_service.machine import probe, write_machine

log = logging.getLogger(__name__)

_LOCK: Final = "agent-host.lock"
_RESTART: Final = "restart it with the reconciler's version"
_LOOK: Final = 0.1
_CONNECTION_SECONDS: Final = 10.0


class AgentHost:
    """Answers questions, one at a time. Thread-safe."""

    def __init__(self, home: HomePaths) -> None:
        self._home = home
        self._launcher = LocalLauncher(home)
        self._one_at_a_time = threading.Lock()
        self._started: set[str] = set()  # names of attempts
        self._ending = False

    def answer(self, question: Question) -> Answer:
        with self._one_at_a_time:
            try:
                return self._answer(question)
            except LaunchError as error:
                return Answer(refused=error.detail)
            except Exception as error:
                log.exception("%s of %s failed", question.what, question.job_id or "all")
                return Answer(away=f"the agent host cannot {question.what}: {type(error).__name__}: {error}")

    def _answer(self, question: Question) -> Answer:
        match question.what:
            case "ping":
                return Answer()
            case "running":
                return Answer(names=[ref.name for ref, _ in self._launcher.running()])
            case "sweep":
                return Answer(names=self._launcher.sweep(lambda found: [n for n in found if n not in question.names]))
        if not is_job_id(question.job_id) or question.epoch < 1:
            return Answer(refused=f"{question.job_id!r}, attempt {question.epoch}: that is no attempt")
        ref = AttemptRef(question.job_id, question.epoch, self._home.job(question.job_id).attempt(question.epoch))
        match question.what:
            case "look":
                return Answer(alive=self._launcher.poll(ref).alive, own=ref.name in self._started)
            case "start":
                return self._start(ref)
            case "stop":
                self._launcher.stop(ref, 0)
            case "kill":
                return Answer(names=self._launcher.kill(ref))
        return Answer()

    def _start(self, ref: AttemptRef) -> Answer:
        if self._ending:
            return Answer(away="the agent host is ending: agents are started again once it is back")
        if self._launcher.began(ref):
            return Answer()
        launch = read_launch_file(ref.paths)
        if launch is None or launch.protocol != PROTOCOL_VERSION:
            return Answer(away=f"the agent host does not understand {ref.paths.launch_file}: {_RESTART}")
        self._started.add(ref.name)
        self._launcher.start(self._launcher.plan(launch))
        log.info("%s: started", ref.name)
        return Answer()

    def end_agents(self) -> None:
        """Start no agent any more, ask those that run to stop, and return once they have ended."""
        with self._one_at_a_time:
            self._ending = True
        asked: set[str] = set()
        while self._any_alive(asked):
            time.sleep(_LOOK)

    def _any_alive(self, asked: set[str]) -> bool:
        """Who was not ``asked`` to stop is, once it has begun and can be."""
        alive = False
        with self._one_at_a_time:
            for ref, _ in self._launcher.running():
                state = self._launcher.poll(ref)
                alive = alive or state.alive
                if state.alive and state.seen and ref.name not in asked:
                    asked.add(ref.name)
                    self._launcher.stop(ref, 0)
                    log.info("%s: asked to save a checkpoint and stop; waiting for its end", ref.name)
        return alive


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: int, host: AgentHost) -> None:
        self.host = host
        super().__init__(address(folder), _Handler)


class _Handler(socketserver.BaseRequestHandler):
    request: socket.socket
    server: _Server

    def handle(self) -> None:
        self.request.settimeout(_CONNECTION_SECONDS)
        with suppress(OSError):
            try:
                answer = self.server.host.answer(read_line(self.request, Question))
            except ValueError:
                answer = Answer(away=f"the agent host does not understand the question: {_RESTART}")
            send_line(self.request, answer)


@contextmanager
def _answering(home: Path, host: AgentHost) -> Iterator[None]:
    """Answer while the block runs. The socket is this user's alone."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    path = Path(address(folder))
    try:
        path.unlink(missing_ok=True)  # of one that was killed: the lock is ours
        with _Server(folder, host) as server:
            path.chmod(0o600)
            threading.Thread(target=server.serve_forever, args=(_LOOK,), name="answers", daemon=True).start()
            yield
            server.shutdown()
        path.unlink(missing_ok=True)
    finally:
        os.close(folder)


def run(home: HomePaths, cpu_slots: int | None) -> None:
    """Until SIGTERM or SIGINT. Raises ``StartError``."""
    home.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home.home / _LOCK).open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(
                f"an agent host runs in {home.home} already: end that one, or give another --home"
            ) from None
        try:
            machine = probe(cpu_slots)
        except ValueError as error:
            raise StartError(str(error)) from None
        if os.geteuid() == 0:
            log.warning("this agent host runs as root, and so does the code of every job: start it as another user")
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        host = AgentHost(home)
        with _answering(home.home, host):
            write_machine(home.home, machine, Interpreters(OWN).ask(machine.python).torch_cuda)
            log.info(
                "agents of %s are started here; %d GPUs, %d CPU slots",
                home.home,
                len(machine.gpus),
                machine.capacity.cpus,
            )
            stopping.wait()
            host.end_agents()
    log.info("ended; jobs that were stopped go on once an agent host is here again")
