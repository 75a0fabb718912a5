"""What an agent refuses to run, and what its ranks are started with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ratchet_contract.exit_codes import EXIT_LEASE_LOST, EXIT_USER_ERROR
from ratchet_contract.phases import Cause, Desired
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import AgentFile, Control
from ratchet_worker.agent.rank_handle import Timing
from ratchet_worker.agent.rank_starter import Starter
from ratchet_worker.agent.supervisor import Supervisor
from ratchet_worker.ipc.result_files import NotStarted
from tests.support.attempts import Attempt
from tests.support.server import wait_for


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[list[Attempt]]:
    made: list[Attempt] = []
    yield made
    for attempt in made:
        attempt.close()


def test_second_agent_of_an_attempt_is_refused(attempts: list[Attempt], tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, [{}])
    attempts.append(attempt)
    first = attempt.start()
    attempt.wait_step(0)
    told = AgentFile.model_validate_json(attempt.paths.agent_file.read_bytes())
    assert (told.pid, told.start_time) == (first.pid, procfs.start_time(first.pid))
    second = attempt.start()
    wait_for(lambda: second.poll() is not None, "the second agent to give up")
    assert second.returncode == EXIT_LEASE_LOST and "another agent runs this attempt" in attempt.log()
    assert first.poll() is None and len(attempt.rank_pids()) == 1
    first.kill()
    first.wait()
    third = attempt.start()  # the lock is free now, but the attempt has been run: its attempt is used up
    wait_for(lambda: third.poll() is not None, "the third agent to give up")
    assert third.returncode == EXIT_LEASE_LOST and "was run before" in attempt.log()
    assert not attempt.paths.result_file.exists()


def test_protocol_mismatch_is_refused_with_an_upgrade_result(attempts: list[Attempt], tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, [{}])
    attempts.append(attempt)
    raw = json.loads(attempt.paths.launch_file.read_text())
    attempt.paths.launch_file.write_text(json.dumps({**raw, "protocol": 999, "new_field": 1}))
    agent = attempt.start()
    result = attempt.wait()
    assert result.cause is Cause.UPGRADE and agent.returncode != 0  # an image that was not upgraded with the service
    assert result.message is not None and "the service uses 999: install the service's version" in result.message
    assert not attempt.paths.log(0).exists()  # no rank was started


def _with(attempt: Attempt, **resolved: Any) -> None:
    raw = json.loads(attempt.paths.launch_file.read_text())
    raw["resolved"].update(resolved)
    attempt.paths.launch_file.write_text(json.dumps(raw))


def test_attempt_that_cannot_start_has_cause_and_message(attempts: list[Attempt], tmp_path: Path) -> None:
    secret = Attempt(tmp_path / "a", [{}], spec={"secrets": {"KEY": {"from_env": "NOT_SET_ANYWHERE"}}})
    python = Attempt(tmp_path / "b", [{}], spec={"python": "/nowhere/python"})
    _with(python, python="/nowhere/python")
    early = Attempt(tmp_path / "c", [{}], desired=Desired.SUSPEND)
    workdir = Attempt(tmp_path / "d", [{}])
    newer = Attempt(tmp_path / "e", [{}])
    attempts += [secret, python, early, workdir, newer]
    raw = json.loads(workdir.paths.launch_file.read_text())
    workdir.paths.launch_file.write_text(json.dumps({**raw, "workdir": "/nowhere/work"}))
    raw = json.loads(newer.paths.launch_file.read_text())  # of a service with a key that this version does not know
    newer.paths.launch_file.write_text(json.dumps({**raw, "spec": {**raw["spec"], "weather": "fine"}}))
    for attempt in attempts:
        attempt.start()
    found = {attempt: attempt.wait() for attempt in attempts}
    assert found[secret].cause is Cause.USER_ERROR and "NOT_SET_ANYWHERE" in (found[secret].message or "")
    assert secret.agents[0].returncode == EXIT_USER_ERROR
    assert found[python].cause is Cause.USER_ERROR and "/nowhere/python" in (found[python].message or "")
    assert found[early].cause is Cause.API_SUSPEND and found[early].ranks == []
    assert found[workdir].cause is Cause.LAUNCHER_ERROR and "/nowhere" in (found[workdir].message or "")
    assert found[newer].cause is Cause.LAUNCHER_ERROR and "('spec', 'weather')" in (found[newer].message or "")


def test_stop_that_arrives_before_the_ranks_are_started_prevents_the_start(tmp_path: Path) -> None:
    attempt, never = Attempt(tmp_path, [{}]), cast(Starter, None)
    supervisor = Supervisor(attempt.launch, attempt.paths, never, Timing())
    supervisor.raise_if_over()
    supervisor.on_control(Control(desired=Desired.CANCEL))
    with pytest.raises(NotStarted) as over:
        supervisor.start([])
    assert over.value.conclusion.cause is Cause.API_CANCEL


def test_agent_process_never_imports_torch() -> None:
    """Every module that the agent loads, in a fresh process; ``agent_main`` asserts the same after each run."""
    program = "import sys, ratchet_worker.agent; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
