"""``ratchet agent-host``: starts the agents of local jobs for a reconciler elsewhere. It uses no database, so its
container need not have the service's data. On SIGTERM it stops its agents, and exits once they have ended."""

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
from ratchet_service.errors import StartError
from ratchet_service.isolation.sandbox import NO_SANDBOX
from ratchet_service.launchers.base import AttemptRef, LaunchError
from ratchet_service.launchers.launch_file import read_launch_file
from ratchet_service.launchers.local.agent_host_client import Answer, Question, read_line, send_line, socket_address
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.scheduling.machine import detect_machine, write_machine
from ratchet_service.user_code.interpreter_probe import Interpreters

log = logging.getLogger(__name__)

_LOCK: Final = "agent-host.lock"
_RESTART: Final = "restart it with the reconciler's version"
_POLL_SECONDS: Final = 0.1
_CONNECTION_SECONDS: Final = 10.0


class AgentHost:
    """Carries out the requests of reconcilers, one at a time. Thread-safe."""

    def __init__(self, home: HomePaths) -> None:
        self._home = home
        self._launcher = LocalLauncher(home)
        self._lock = threading.Lock()
        self._started: set[str] = set()  # names of attempts
        self._stopping = False

    def answer(self, question: Question) -> Answer:
        """Carry out the request and return the answer. Raises nothing: errors become answers. Blocks while another request is
        carried out."""
        with self._lock:
            try:
                return self._answer(question)
            except LaunchError as error:
                return Answer(refused=error.detail)
            except Exception as error:
                log.exception("%s of %s failed", question.what, question.job_id or "all")
                return Answer(away=f"the agent host cannot {question.what}: {type(error).__name__}: {error}")

    def _answer(self, question: Question) -> Answer:
        """Carry out the request and return the answer. Raises ``LaunchError``, and any error of the launcher."""
        match question.what:
            case "ping":
                return Answer()
            case "running":
                return Answer(names=[ref.name for ref, _ in self._launcher.running_attempts()])
            case "sweep":
                return Answer(names=self._launcher.sweep(lambda found: [n for n in found if n not in question.names]))
        if not is_job_id(question.job_id) or question.attempt < 1:
            return Answer(refused=f"{question.job_id!r}, attempt {question.attempt}: not a valid attempt")
        ref = AttemptRef(question.job_id, question.attempt, self._home.job(question.job_id).attempt(question.attempt))
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
        """Start the attempt's agents, unless they were started before. If that is impossible now, the answer's ``away`` says why.
        Raises ``LaunchError``."""
        if self._stopping:
            return Answer(away="the agent host is shutting down: agents are started again after its restart")
        if self._launcher.has_started(ref):
            return Answer()
        launch = read_launch_file(ref.paths)
        if launch is None or launch.protocol != PROTOCOL_VERSION:
            return Answer(away=f"the agent host cannot read {ref.paths.launch_file}: {_RESTART}")
        self._started.add(ref.name)
        self._launcher.start(self._launcher.plan(launch))
        log.info("%s: started", ref.name)
        return Answer()

    def end_agents(self) -> None:
        """Start no more agents, send SIGTERM to those that run, and block until all have ended."""
        with self._lock:
            self._stopping = True
        stop_requested: set[str] = set()
        while self._stop_running(stop_requested):
            time.sleep(_POLL_SECONDS)

    def _stop_running(self, stop_requested: set[str]) -> bool:
        """Send SIGTERM to the agents of each attempt not in ``stop_requested`` yet, and add it there. An attempt whose agents are
        still starting is left for a later call. Return True if any agent is alive."""
        alive = False
        with self._lock:
            for ref, _ in self._launcher.running_attempts():
                state = self._launcher.poll(ref)
                alive = alive or state.alive
                if state.alive and state.seen and ref.name not in stop_requested:
                    stop_requested.add(ref.name)
                    self._launcher.stop(ref, 0)
                    log.info("%s: asked to save a checkpoint and stop; waiting for its end", ref.name)
        return alive


class _Server(socketserver.ThreadingUnixStreamServer):
    """Socket server of the agent host, with one thread per connection. ``folder``: descriptor of the socket's directory."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: int, host: AgentHost) -> None:
        self.host = host
        super().__init__(socket_address(folder), _Handler)


class _Handler(socketserver.BaseRequestHandler):
    """Answers one request on one connection."""

    request: socket.socket
    server: _Server

    def handle(self) -> None:
        """Read one request, and send the answer. Errors of the connection are ignored."""
        self.request.settimeout(_CONNECTION_SECONDS)
        with suppress(OSError):
            try:
                answer = self.server.host.answer(read_line(self.request, Question))
            except ValueError:
                answer = Answer(away=f"the agent host cannot parse the request: {_RESTART}")
            send_line(self.request, answer)


@contextmanager
def _serve_requests(home: Path, host: AgentHost) -> Iterator[None]:
    """Answer requests on the socket in the run directory during the block. Only this process's user, and root, can connect."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    path = Path(socket_address(folder))
    try:
        path.unlink(missing_ok=True)  # left by a killed agent host: we hold the lock
        with _Server(folder, host) as server:
            path.chmod(0o600)
            threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="answers", daemon=True).start()
            yield
            server.shutdown()
        path.unlink(missing_ok=True)
    finally:
        os.close(folder)


def run(home: HomePaths, cpu_slots: int | None) -> None:
    """Run the agent host until SIGTERM or SIGINT; then stop its agents, and return once they have ended. Raises
    ``StartError``."""
    home.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home.home / _LOCK).open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"an agent host already runs in {home.home}: stop it, or set another --home") from None
        try:
            machine = detect_machine(cpu_slots)
        except ValueError as error:
            raise StartError(str(error)) from None
        if os.geteuid() == 0:
            log.warning("this agent host runs as root, and so does the code of every job: start it as another user")
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        host = AgentHost(home)
        # before it answers: a service that starts then needs the file
        write_machine(home.home, machine, Interpreters(NO_SANDBOX).query(machine.python).torch_cuda)
        with _serve_requests(home.home, host):
            log.info(
                "agents of %s are started here; %d GPUs, %d CPU slots",
                home.home,
                len(machine.gpus),
                machine.capacity.cpus,
            )
            stopping.wait()
            host.end_agents()
    log.info("ended; stopped jobs continue once an agent host runs here again")
