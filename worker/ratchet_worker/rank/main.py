"""One rank of a job: ``python -m ratchet_worker.rank``, started by the agent. Installs its signal handlers before it imports
torch; a forked rank has torch already."""

from __future__ import annotations

import gc
import json
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet_contract import env_vars as names
from ratchet_contract.exit_codes import EXIT_USER_ERROR
from ratchet_worker.coordination.stop_listener import STOP_SIGNALS, Listener
from ratchet_worker.host.cpu import gc_disabled
from ratchet_worker.host.interpreter_shutdown import shut_down
from ratchet_worker.ipc.child_processes import die_with_parent
from ratchet_worker.rank import fork_server

if TYPE_CHECKING:
    from ratchet_contract.protocol.messages import LaunchFile


def main() -> int:
    """Run this rank to its end and return the process's exit code, or exit the process. In the fork server, first fork the ranks:
    each continues here, or in a new interpreter."""
    inherited = fork_server.fork_ranks() if names.FORK_PLANS_FD in os.environ else None
    if names.LAUNCH_FILE not in os.environ:
        print("ratchet: this is one rank of a job and is started by its agent: use ratchet submit", file=sys.stderr)
        return EXIT_USER_ERROR
    if agent := os.environ.get(names.AGENT_PID):
        die_with_parent(int(agent))
    listener = Listener()
    listener.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # they are blocked in a process forked by the fork server
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank-{os.environ[names.RANK]}")  # for ps, top and py-spy
    from ratchet_contract.protocol.messages import LaunchFile
    from ratchet_contract.version import PROTOCOL_VERSION

    text = Path(os.environ[names.LAUNCH_FILE]).read_bytes()
    if (protocol := json.loads(text).get("protocol")) != PROTOCOL_VERSION:
        return _other_protocol(protocol)
    launch = LaunchFile.model_validate_json(text)
    launch = launch.for_node(int(os.environ[names.GROUP_RANK]))
    if found := os.environ.get(names.CODE_DIGEST):  # code that lies on the nodes: known only now
        launch = launch.model_copy(update={"resolved": launch.resolved.model_copy(update={"code_digest": found})})
    try:
        with gc_disabled():
            from ratchet_worker.rank.rank_process import RankProcess  # torch
    except ModuleNotFoundError as error:
        return _not_installed(launch, error)
    gc.freeze()
    code = RankProcess(launch, listener).execute()
    if inherited is not None:
        shut_down(code, inherited)
    return code


def _not_installed(launch: LaunchFile, error: ModuleNotFoundError) -> int:
    """Refuse to run because a package is missing: write a result, and return its exit code."""
    command = shlex.join([sys.executable, "-m", "pip", "install", "ratchet-train[worker]"])
    text = f"{sys.executable} has no {error.name}, which a rank needs: {command}; then `ratchet resume {launch.job_id}`"
    return _exit_refused(text)


def _other_protocol(protocol: object) -> int:
    """Refuse to run because interpreter and service have different protocols: write a result, and return its exit code."""
    from ratchet_contract.version import not_upgraded

    return _exit_refused(not_upgraded(sys.executable, protocol), "upgrade")


def _exit_refused(text: str, cause: str = "user-error") -> int:
    """Write a result with the message ``text``, which also goes to stderr, and return its exit code."""
    from ratchet_contract.exit_codes import exit_code_of
    from ratchet_contract.paths import AttemptPaths
    from ratchet_contract.phases import Cause
    from ratchet_contract.protocol.messages import RankResult
    from ratchet_worker.ipc.log_lines import now, print_to_log
    from ratchet_worker.ipc.result_files import write_rank_result

    print_to_log(f"ratchet: {text}")
    rank = int(os.environ[names.RANK])
    result = RankResult(rank=rank, cause=Cause(cause), at=now(), last_step=0, message=text)
    write_rank_result(AttemptPaths(Path(os.environ[names.ATTEMPT_DIR])).rank_result(rank), result)
    return exit_code_of(result.cause)
