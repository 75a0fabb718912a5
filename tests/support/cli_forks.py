"""Commands of ``ratchet``, each a process of its own, forked from one that has imported the command line.

Its import is most of what a command costs. As a program (``cli_forks.py SOCKET``) this is the process that forks; ``Forks`` is
the tests' end of the socket. A request is a command's arguments, directory and environment, with five descriptors: its three
streams, and the ends of two pipes that tell the command's pid and its exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LONGEST = 1 << 20  # bytes of a request
_IMPORTED = (
    "ratchet_client.cli.app",
    "ratchet_client.client",
    "ratchet_client.spec_file",
    "httpcore",
    "typer._adapters",
)
_OWN = ("COLUMNS", "PYTEST_CURRENT_TEST")  # variables that mean nothing to the imports, beside RATCHET_...


def meant_for_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment an interpreter's start or an import may look at."""
    return {k: v for k, v in environment.items() if not k.startswith("RATCHET_") and k not in _OWN}


class Forks:
    """The forking process, with the environment that the tests were started in. It starts with the first command and ends with
    the tests' process."""

    def __init__(self, executable: Path) -> None:
        self._executable = executable
        self._imported = meant_for_imports(os.environ)
        self._socket: socket.socket | None = None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Would a command started afresh with ``environment`` import what the forking process did?"""
        return meant_for_imports(environment) == self._imported

    def _started(self) -> socket.socket:
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
        self._socket = self._socket or self._started()
        request = json.dumps([[str(self._executable), *arguments], str(cwd), dict(env)]).encode()
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            given.write(stdin.encode())
            given.seek(0)
            ended, end = os.pipe()
            streams = [given.fileno(), out.fileno(), errors.fileno()]
            try:
                socket.send_fds(self._socket, [request], [*streams, end])
            finally:
                os.close(end)
            with open(ended, "rb", buffering=0) as told:
                pid, code = json.loads(told.readline()), _line(told, deadline)
                if code is None:
                    os.kill(pid, 9)
                    raise subprocess.TimeoutExpired(arguments, deadline)
            return code, _text(out), _text(errors)


def _line(told: Any, deadline: float) -> int | None:
    ready, _, _ = select.select([told], [], [], deadline)
    return int(told.readline()) if ready else None


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


def _keep(end: int) -> None:
    """Fork the command and go on as it; its parent tells of it, and ends."""
    pid = os.fork()
    if pid == 0:
        return
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
    _keep(descriptors[3])
    arguments, directory, environment = json.loads(message)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    from ratchet_client.cli import main

    gc.collect()
    gc.freeze()  # a command's first collection would copy every page
    _next_command(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(main())
