"""What benchmarks start, forked (``interpreters``): their tests look at what is printed, and most of their time was imports."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import cast

from benchmarks.network_groups import _start
from examples.demo.processes import Service
from ratchet_contract import env_vars as names
from ratchet_worker.agent.rank_starter import RankPlan
from tests.support.fork_server import RANKS, SERVICES


class ForkedService(Service):
    """With its agents and ranks."""

    def _begin(self, command: list[str], log: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        RANKS.wait_ready()  # a launcher is not to wait for it
        return cast("subprocess.Popen[bytes]", SERVICES.start(command, log, env=env, agents=RANKS.address))


def start_forked(plan: RankPlan, prefix: Sequence[str]) -> subprocess.Popen[bytes]:
    """For ``benchmarks.network_groups._start``: but for a rank of Ratchet's, which lives only as a child of who starts it."""
    if names.AGENT_PID in plan.env:
        return _start(plan, prefix)
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    with plan.log.open("ab") as log:
        started = RANKS.start([*prefix, *plan.command], log.fileno(), env=plan.env, cwd=plan.cwd)
    return cast("subprocess.Popen[bytes]", started)
