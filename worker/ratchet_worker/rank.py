"""One rank of a job: ``python -m ratchet_worker.rank``, started by the agent with torchrun's variables and ``RATCHET_*``.

The process first ties its life to the agent's and learns to hear signals; torch, which takes seconds, comes after that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ratchet_contract import environment as names
from ratchet_contract.exit_codes import EXIT_USER_ERROR
from ratchet_worker.listener import Listener
from ratchet_worker.procs import die_with_parent


def main() -> int:
    """Returns the exit code of a clean end; a failure leaves the process at once, with its result written."""
    if names.LAUNCH_FILE not in os.environ:
        print("ratchet: this is one rank of a job and is started by its agent: use ratchet submit", file=sys.stderr)
        return EXIT_USER_ERROR
    if agent := os.environ.get(names.AGENT_PID):
        die_with_parent(int(agent))
    listener = Listener()
    listener.install()
    from ratchet_contract.messages import LaunchFile

    launch = LaunchFile.model_validate_json(Path(os.environ[names.LAUNCH_FILE]).read_bytes())
    from ratchet_worker.process import RankProcess  # torch

    return RankProcess(launch, listener).execute()


if __name__ == "__main__":
    sys.exit(main())
