"""One rank of a job: ``python -m ratchet_worker.rank``, started by the agent with torchrun's variables and ``RATCHET_*``.

The process first ties its life to the agent's and learns to hear signals; torch, which takes seconds, comes after that. Where
ranks are forked, torch is there already, and what is run here is run in each of the forked processes.
"""

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

from ratchet_contract import environment as names
from ratchet_contract.exit_codes import EXIT_USER_ERROR
from ratchet_worker import fork_server
from ratchet_worker.imports import uncollected
from ratchet_worker.listener import STOP_SIGNALS, Listener
from ratchet_worker.procs import die_with_parent

if TYPE_CHECKING:
    from ratchet_contract.messages import LaunchFile


def main() -> int:
    """Returns the exit code of a clean end; a failure leaves the process at once, with its result written."""
    if names.FORK_PLANS_FD in os.environ:
        fork_server.serve()
    if names.LAUNCH_FILE not in os.environ:
        print("ratchet: this is one rank of a job and is started by its agent: use ratchet submit", file=sys.stderr)
        return EXIT_USER_ERROR
    if agent := os.environ.get(names.AGENT_PID):
        die_with_parent(int(agent))
    listener = Listener()
    listener.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a fork server's forked process begins with them blocked
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank-{os.environ[names.RANK]}")  # for ps, top and py-spy
    from ratchet_contract.messages import LaunchFile
    from ratchet_contract.version import PROTOCOL_VERSION

    text = Path(os.environ[names.LAUNCH_FILE]).read_bytes()
    if (protocol := json.loads(text).get("protocol")) != PROTOCOL_VERSION:
        return _other_protocol(protocol)
    launch = LaunchFile.model_validate_json(text)
    launch = launch.of_node(int(os.environ[names.GROUP_RANK]))
    if found := os.environ.get(names.CODE_DIGEST):  # known only now: the code lies on the nodes
        launch = launch.model_copy(update={"resolved": launch.resolved.model_copy(update={"code_digest": found})})
    try:
        with uncollected():
            from ratchet_worker.process import RankProcess  # torch
    except ModuleNotFoundError as error:
        return _not_installed(launch, error)
    gc.freeze()
    return RankProcess(launch, listener).execute()


def _not_installed(launch: LaunchFile, error: ModuleNotFoundError) -> int:
    """It was there when the job was submitted, or nobody could look."""
    command = shlex.join([sys.executable, "-m", "pip", "install", "ratchet-train[worker]"])
    text = f"{sys.executable} has no {error.name}, which a rank needs: {command}; then `ratchet resume {launch.job_id}`"
    return _refuse(text)


def _other_protocol(protocol: object) -> int:
    """The service has been upgraded, and the job's own interpreter (``python``) has not: it is tried again until it has."""
    from ratchet_contract.version import not_upgraded

    return _refuse(not_upgraded(sys.executable, protocol), "upgrade")


def _refuse(text: str, cause: str = "user-error") -> int:
    """Nothing has begun."""
    from ratchet_contract.exit_codes import exit_code_of
    from ratchet_contract.messages import RankResult
    from ratchet_contract.paths import AttemptPaths
    from ratchet_contract.phases import Cause
    from ratchet_worker.files import now
    from ratchet_worker.results import write_rank_result

    print(f"ratchet: {text}", file=sys.stderr, flush=True)
    rank = int(os.environ[names.RANK])
    result = RankResult(rank=rank, cause=Cause(cause), at=now(), last_step=0, message=text)
    write_rank_result(AttemptPaths(Path(os.environ[names.ATTEMPT_DIR])).rank_result(rank), result)
    return exit_code_of(result.cause)


if __name__ == "__main__":
    sys.exit(main())
