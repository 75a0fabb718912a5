"""Parked agents of a real service: a restart under ``--run-as`` finds what a cold start finds; a killed service leaves none."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract import env_vars
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.processes import procfs
from ratchet_service.launchers.local.standby import MODULE
from tests.integration.service.launchers.test_standby import DUMP, same_start
from tests.support.full_matrix import full
from tests.support.run_as import AS_ROOT, UID, command_prefix, open_directory
from tests.support.server import Server, rank_pid, wait_for


def dumps(attempt: AttemptPaths) -> list[dict[str, Any]]:
    wait_for(lambda: len(list(attempt.root.glob("dump-?"))) == 2, f"the ranks' dumps in {attempt.root}", 90)
    return [json.loads(path.read_text()) for path in sorted(attempt.root.glob("dump-?"))]


def parked_agent(server: Server) -> int:
    """Wait until one has made all imports; its pid."""
    text = wait_for(
        lambda: re.search(r"^ratchet_parked_agents 1", server.call("GET", "/metrics").text, re.M), "a parked agent", 90
    )
    assert text
    (pid,) = (
        pid
        for pid in procfs.pids()
        if procfs.runs_as(pid, UID) and MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return pid


def starts(server: Server, job: str) -> set[tuple[int, str, str | None]]:
    """How the attempts whose events have arrived began: number, parked or cold, and why."""
    events = server.call("GET", f"/v1/jobs/{job}/events?type=rank-started").json()["items"]
    return {(event["attempt"], event["data"]["start"], event["data"].get("why")) for event in events}


@AS_ROOT
@full
@pytest.mark.slow
def test_restart_under_run_as_in_a_parked_agent_which_ends_with_a_killed_service() -> None:
    with open_directory() as place:
        code = place / "code"
        code.mkdir()
        (code / "dump.py").write_text(DUMP)
        options = ("--run-as", f"{UID}:{UID}", "--auth", "token", "--code-root", str(code))
        prefix = command_prefix(place)
        server = Server(
            place / "home", *options, afresh=True, prefix=prefix, variables={env_vars.STANDBY: "processes=1"}
        )
        try:
            server.start().use_admin_token()
            job = server.submit(
                {"name": "dump", "code": {"path": str(code)}, "script": ["dump.py"],
                 "world": {"ranks_per_node": 2, "device": "cpu"}, "resources": {"cpus_per_rank": 1}}
            )  # fmt: skip
            attempts = [server.paths.job(job).attempt(number) for number in (1, 2)]
            cold = dumps(attempts[0])
            agent = parked_agent(server)
            assert procfs.runs_as(agent, UID)
            fleet = server.call("GET", "/v1/fleet").json()["parked"]
            assert (fleet["ready"], fleet["starting"]) == (1, 0) and 10**7 < fleet["memory_bytes"] < 2**30
            os.kill(rank_pid(attempts[0], 1), signal.SIGKILL)
            parked = dumps(attempts[1])
            assert os.getsid(rank_pid(attempts[1], 1)) == rank_pid(attempts[1], 1)
            assert "start: parked" in attempts[1].node(0).agent_log.read_text()
            expected = {(1, "cold", "no agent of this kind is parked yet"), (2, "parked", None)}
            wait_for(lambda: starts(server, job) == expected, f"{expected} in the events", 20)
            for one, other in zip(cold, parked, strict=True):
                same_start(one, other, ("1", "2"))
                assert one["process: status"]["Uid"].split() == [str(UID)] * 4
            last = parked_agent(server)
            assert last != agent
            server.kill()
            wait_for(lambda: procfs.start_time(last) is None, "the parked agent's end", 10)
            assert procfs.start_time(agent) is not None
        finally:
            server.stop()
