"""``python -m ratchet_worker.agent.parked FD``: an agent without an attempt. It has made its imports, and its fork server makes
those of ranks. On the socket FD a launcher first sends a ``LaunchFile`` without a job, which has what decides the ranks'
environment, and what else is imported; later, it may send an attempt. The process then becomes the agent of this attempt. It ends
with the launcher.

With the message ``FORK``, the launcher sends a socket and the output of another parked agent. It is forked by the fork server,
whose imports it shares: it starts without an import of torch (``rank.fork_server``), as ``python -m ratchet_worker.agent.parked
FD,CONTROL,REPORT,OUTPUT,PID``, with the descriptors and the pid of its own fork server."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ratchet_contract import env_vars as names
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_worker.agent import main
from ratchet_worker.agent.checkpoint_upload import exit_process
from ratchet_worker.agent.fork_starter import ForkingStarter, ParkedServer, ParkedStarter, Preload
from ratchet_worker.agent.rank_environment import common_environment, interpreter, rank_command
from ratchet_worker.agent.rank_starter import ProcessStarter
from ratchet_worker.ipc.process_listing import show_arguments, show_variables, start_environment

_MODULE: Final = "ratchet_worker.agent.parked"
_MAX_MESSAGE: Final = 1 << 18
FORK: Final = b"fork"


def run(descriptors: str) -> int:
    """Wait for an attempt, run it, and return the agent's exit code. Exits the process if the launcher ends, or if the fork
    server cannot fork ranks. ``descriptors``: the first argument of the command."""
    fd, *server_numbers = map(int, descriptors.split(","))
    copy = {
        "command": sys.orig_argv[: sys.orig_argv.index(_MODULE) + 1],
        "room": sys.orig_argv[-1],
        "env": start_environment(),
        "cwd": str(Path("/proc/self/cwd").readlink()),
    }
    with socket.socket(fileno=fd) as launcher:
        message = launcher.recv(_MAX_MESSAGE)
        if not message:
            os._exit(0)
        given = json.loads(message)
        like = LaunchFile.model_validate(given["like"])
        del os.environ[names.PARKED]
        environment = common_environment(like, os.environ, "")
        preload = Preload(main.preloaded_modules(like), given["packages"], given["code"])
        cold = ProcessStarter() if like.resolved.device == "cuda" else ForkingStarter(preload.modules)
        if server_numbers:
            server = ParkedServer.inherited(*server_numbers)
        else:
            server = ParkedServer.start(rank_command(interpreter(like)), environment, preload)
        starter = ParkedStarter(server, environment, cold)
        launcher.send(f"started {starter.pid}".encode())
        attempt = _wait_for_attempt(launcher, server, starter, copy)
        starter.same_code = attempt["same_code"]
        variables = {names.ATTEMPT_DIR: attempt["attempt_dir"], names.START: "parked"}
        os.environ.update(variables)
        shown = show_variables(names.PARKED, variables)
        shown = shown and show_arguments(_MODULE, f"ratchet_worker.agent\0{attempt['launch_file']}")
        # From here on other processes see an agent of the attempt. It does nothing before the launcher has seen this answer.
        launcher.send(b"taken" if shown else b"unfit")
        if launcher.recv(16) != b"go":
            os._exit(0)
    return main.run(Path(attempt["launch_file"]), starter)


def _wait_for_attempt(
    launcher: socket.socket, server: ParkedServer, starter: ParkedStarter, copy: dict[str, Any]
) -> dict[str, Any]:
    """Return the launcher's attempt, after its log has become this process's output. Until then, have the server fork the agents
    that the launcher requests. ``copy``: of ``ParkedServer.fork_agent``."""
    waiting = [launcher.fileno(), starter.fileno()]
    while True:
        readable, _, _ = select.select(waiting, [], [])
        if launcher.fileno() in readable:
            message, fds, _, _ = socket.recv_fds(launcher, _MAX_MESSAGE, 2)
            if message != FORK:
                break
            with suppress(OSError):  # the server has ended: the launcher sees that the new agent's socket is closed
                server.fork_agent(fds, copy)
            for fd in fds:
                os.close(fd)
        else:
            if not starter.is_ready():
                os._exit(1)
            waiting = waiting[:1]
            launcher.send(b"ready")
    if not message:
        os._exit(0)
    os.dup2(fds[0], 1)
    os.dup2(fds[0], 2)
    os.close(fds[0])
    return dict(json.loads(message))


if __name__ == "__main__":
    exit_process(run(sys.argv[1]))
