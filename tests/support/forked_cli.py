"""Commands of ``ratchet``, each a process of its own, forked from one that has imported the command line.

Its import, and the making of all its options, are nearly all that a command costs. As a program (``forked_cli.py SOCKET``) this
is the process that forks; ``Forks`` is the tests' end of the socket. A request is a command's arguments, directory,
environment, and whether it shall have a session of its own with the terminal that is its standard input, and what forks the
service that it may start for itself; with four descriptors: its three streams, and the end of a pipe that tells the command's
pid and its exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

_LONGEST = 1 << 20  # bytes of a request
_IMPORTED = (
    "ratchet_client.cli.app",
    "ratchet_client.client",
    "ratchet_client.resources.spec_file",
    "httpcore",
    "typer._adapters",
    "typer.rich_utils",
    "rich.live",
    "rich.progress",
)
# Variables that mean nothing to the imports, beside RATCHET_... and SLURM_...
_OWN = ("COLUMNS", "HOME", "NO_COLOR", "PYTEST_CURRENT_TEST", "TERM", "XDG_RUNTIME_DIR")


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment an interpreter's start or an import may look at."""
    return {k: v for k, v in environment.items() if not k.startswith(("RATCHET_", "SLURM_")) and k not in _OWN}


class Forks:
    """The forking process, with the environment that the tests were started in. It starts with the first command and ends with
    the tests' process."""

    def __init__(self, executable: Path) -> None:
        self._executable = executable
        self._imported = import_environment(os.environ)
        self._socket: socket.socket | None = None

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        """Would a command started afresh with ``environment`` import what the forking process did?"""
        return import_environment(environment) == self._imported

    def _start_server(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], env=self._imported, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

        def end_it() -> None:
            ours.close()
            process.wait(10)

        atexit.register(end_it)
        return ours

    def run(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: str, deadline: float
    ) -> tuple[int, str, str]:
        """Exit code, output and errors of ``ratchet ARGUMENTS``. Raises ``TimeoutExpired`` after ``deadline`` seconds, with the
        command killed."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            given.write(stdin.encode())
            given.seek(0)
            streams = [given.fileno(), out.fileno(), errors.fileno()]
            with self.start(arguments, streams, cwd=cwd, env=env) as command:
                try:
                    code = command.wait(deadline)
                except subprocess.TimeoutExpired:
                    command.kill()
                    raise
            return code, _text(out), _text(errors)

    def start(
        self,
        arguments: Sequence[str],
        streams: Sequence[int],
        *,
        cwd: Path,
        env: Mapping[str, str],
        terminal: bool = False,
        services: tuple[str, str] | None = None,
    ) -> Command:
        """``ratchet ARGUMENTS`` with three ``streams``; ``terminal``: the first one is its controlling terminal. ``services``:
        the addresses where a service that it starts is forked, and that one's agents (``fork_server``)."""
        self._socket = self._socket or self._start_server()
        request = json.dumps([[str(self._executable), *arguments], str(cwd), dict(env), terminal, services]).encode()
        ended, end = os.pipe()
        try:
            socket.send_fds(self._socket, [request], [*streams, end])
        finally:
            os.close(end)
        return Command(ended)


class Command:
    """What ``subprocess.Popen`` would be, of a process that is somebody else's child. A context manager."""

    def __init__(self, told: int) -> None:
        self._told = os.fdopen(told, "rb", buffering=0)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self._told.close()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            select.select([self._told], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


def _fork_command(descriptors: Sequence[int]) -> None:
    """Fork the command and go on as it; its parent tells of it, and ends."""
    *streams, end = descriptors
    pid = os.fork()
    if pid == 0:
        return
    for descriptor in streams:
        os.close(descriptor)
    os.write(end, b"%d\n" % pid)
    _, status = os.waitpid(pid, 0)
    os.write(end, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _next_command(requests: socket.socket) -> None:
    """Forks a process per request, in which this returns: as that command, just started."""
    keepers = 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _LONGEST, 4)
        if not message:
            os._exit(0)
        keepers += 1
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        while keepers and os.waitpid(-1, os.WNOHANG)[0]:
            keepers -= 1
    requests.close()
    _fork_command(descriptors)
    arguments, directory, environment, terminal, services = json.loads(message)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    if terminal:
        os.setsid()
        os.close(
            os.open(os.ttyname(0), os.O_RDWR)
        )  # the first that a leader without one opens becomes its own: ^C is a signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests' script has it do
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
    if services is not None:
        _fork_service(*services)


def _fork_service(address: str, agents: str) -> None:
    """The service that this process starts for itself is forked at ``address``, and that one's agents at ``agents``."""
    from ratchet_client.cli.shared import service_process

    def start(command: list[str], *, stdout: Any, env: dict[str, str], **more: Any) -> Any:
        found = fork_server.request_fork(address, command, stdout.fileno(), env, Path.cwd(), agents)
        return fork_server.Program(*found) if found else subprocess.Popen(command, stdout=stdout, env=env, **more)

    service_process.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


def _end(program: Callable[[], None]) -> NoReturn:
    """Run it and end as the interpreter would, but for taking apart what was imported, which is half of what is left."""
    code: object = None
    try:
        program()
    except SystemExit as end:
        code = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    fork_server = importlib.import_module("fork_server")  # which lies beside this file
    for name in _IMPORTED:
        importlib.import_module(name)
    import typer.main

    from ratchet_client.cli import main
    from ratchet_client.cli.app import app

    made = typer.main.get_command(app)
    typer.main.get_command = lambda _app: made
    gc.collect()
    gc.freeze()  # a command's first collection would copy every page
    _next_command(socket.socket(fileno=int(sys.argv[1])))
    _end(main)
