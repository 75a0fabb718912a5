"""What an agent host answers where it starts nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.commands.agent_host import AgentHost
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_service.launchers.local.agent_host_client import Question

JOB = "job-0123456789ab"
START = Question(what="start", job_id=JOB, attempt=1)


def launch(home: HomePaths, **more: Any) -> LaunchFile:
    spec = {"name": "a", "task": {"entrypoint": "m:T"}, "world": {"ranks_per_node": 1}, **more}
    resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=sys.executable)
    return build_launch_file(home, JOB, 1, JobSpec.model_validate(spec), resolved, (), "token", Desired.RUN)


def test_agent_host_refuses_start_of_newer_protocol_or_while_ending(tmp_path: Path) -> None:
    home = HomePaths(tmp_path)
    host, paths = AgentHost(home), home.job(JOB).attempt(1)
    assert "restart it" in host.answer(START).away  # there is no launch.json that it can read
    attempt_files.write_launch(paths, launch(home).model_copy(update={"protocol": PROTOCOL_VERSION + 1}))
    assert "restart it" in host.answer(START).away
    attempt_files.write_launch(paths, launch(home))
    host.end_agents()
    assert "is shutting down" in host.answer(START).away
    assert host.answer(Question(what="look", job_id=JOB, attempt=1)).alive is False
    assert not paths.agent_log.exists()


def test_agent_host_names_missing_secret_variable(tmp_path: Path) -> None:
    home = HomePaths(tmp_path)
    attempt_files.write_launch(home.job(JOB).attempt(1), launch(home, secrets={"KEY": {"from_env": "NOT_HERE"}}))
    assert "NOT_HERE" in (told := AgentHost(home).answer(START).refused) and "agent host" in told


def test_agent_host_refuses_question_without_valid_attempt(tmp_path: Path) -> None:
    host = AgentHost(HomePaths(tmp_path))
    for question in (Question(what="kill", job_id="../../x", attempt=1), Question(what="start", job_id=JOB)):
        assert "not a valid attempt" in host.answer(question).refused
