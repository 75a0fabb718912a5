"""A service of another protocol is started over running jobs: none of them ends, none loses a step. Real processes of both.

With RATCHET_TEST_OPTIONS=all (``make exactness``); the rules themselves are in ``tests/unit/service/lifecycle/test_decide.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_contract.version import PROTOCOL_VERSION
from tests.support import gated_task
from tests.support.full_matrix import full
from tests.support.launch import RESOLVED, Job
from tests.support.old_version import ROOT, copy_with_protocol, install_copy, version_environment
from tests.support.server import wait_for
from tests.support.version_skew_home import Home, committed_steps

SCRIPT = """
import sys
import time
from pathlib import Path

Path(sys.argv[1], "began").touch()
while not Path(sys.argv[1], "end").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    (tmp_path / "home").mkdir()
    made = Home(tmp_path / "home")
    yield made
    made.close()


def told(home: Home, job_id: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in home.history(job_id) if event["type"] == kind]


def protocol_of(home: Home, job_id: str, attempt: int) -> int:
    return int(json.loads(home.paths.job(job_id).attempt(attempt).launch_file.read_bytes())["protocol"])


@full
def test_service_upgrade_resumes_jobs_from_a_checkpoint_and_keeps_plain_scripts(home: Home, tmp_path: Path) -> None:
    before, gates, code = (
        copy_with_protocol(tmp_path / "before", PROTOCOL_VERSION - 1),
        tmp_path / "gates",
        tmp_path / "code",
    )
    gates.mkdir()
    code.mkdir()
    gated_task.write_task(code)
    (code / "plain.py").write_text(SCRIPT)
    spec = {
        "name": "trains",
        "task": {
            "entrypoint": gated_task.ENTRYPOINT,
            "args": {"steps": 40, "width": 4, "gates": str(gates), "evaluate": False},
        },
        "code": {"path": str(code)},
        "world": {"ranks_per_node": 2, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "hook": {"name": "powerSGD", "matrix_approximation_rank": 1, "start_powerSGD_iter": 5},
        "checkpoint": {"every_steps": 10},
        "policy": {"max_failures": 0, "max_preemptions": 0},
    }
    own = {**spec, "name": "own", "world": {"device": "cpu"}, "python": str(tmp_path / "venv-own")}
    plain = {
        "name": "plain",
        "script": ["plain.py", str(tmp_path)],
        "code": {"path": str(code)},
        "world": {"device": "cpu"},
        "resources": {"cpus_per_rank": 1},
    }
    python = install_copy(tmp_path / "venv-before", before)
    home.serve_from(python)
    home.ready()
    (gates / "25").touch()
    install_copy(tmp_path / "venv-own", before)
    job_id, script, other = (str(home.call("POST", "/v1/jobs", one)["id"]) for one in (spec, plain, own))
    home.wait(job_id, lambda job: job["last_checkpoint"] == "step-000000000020.a0001", "step 20 to be saved")
    wait_for((tmp_path / "began").exists, "the script to begin")
    home.wait(script, lambda job: job["phase"] == "RUNNING", "the script to be known to run")
    home.wait(other, lambda job: job["last_checkpoint"] == "step-000000000020.a0001", "step 20 to be saved")
    home.kill()

    home.serve_from(install_copy(tmp_path / "venv", ROOT))
    home.ready()
    wait_for(lambda: all(told(home, one, "agent-stopped") for one in (job_id, other)), "the agents to be asked to end")
    (gates / "25").unlink()
    home.wait_succeeded(job_id)
    last, first = home.call("GET", f"/v1/jobs/{job_id}/attempts")["items"]
    assert (first["cause"], first["outcome"], first["steps_lost"]) == ("upgrade", "preempted", 0), first
    assert (last["cause"], last["proof"], last["base"]["step"]) == (
        "completed",
        "exact, no step compared",
        first["last_step"],
    )
    assert 24 <= first["last_step"] < 40 and last["resume_report"]["differences"] == []
    budgets = home.call("GET", f"/v1/jobs/{job_id}")["budgets"]
    assert (budgets["failures"], budgets["preemptions"]) == (0, 0)
    assert (protocol_of(home, job_id, 1), protocol_of(home, job_id, 2)) == (PROTOCOL_VERSION - 1, PROTOCOL_VERSION)
    (stopped,) = told(home, job_id, "agent-stopped")
    assert f"its agent uses protocol {PROTOCOL_VERSION - 1}, this service {PROTOCOL_VERSION}" in stopped["message"]

    undisturbed = str(home.call("POST", "/v1/jobs", spec)["id"])
    home.wait_succeeded(undisturbed)
    compared = home.call("GET", f"/v1/jobs/{job_id}/compare/{undisturbed}")
    assert compared["identical"] and compared["step"] == 40

    waits = home.wait(
        other, lambda job: job["attempt"] > 1 and job["phase"] == "QUEUED", "its interpreter to be refused"
    )
    assert f"{tmp_path / 'venv-own'}/bin/python has a Ratchet with" in waits["message"]
    install_copy(tmp_path / "venv-own", ROOT)
    home.wait_succeeded(other)
    last, *refused, first = home.call("GET", f"/v1/jobs/{other}/attempts")["items"]
    assert (last["base"]["step"], last["base"]["attempt"]) == (first["last_step"], 1) and refused
    assert {(one["cause"], one["outcome"]) for one in refused} == {("upgrade", "preempted")}
    assert home.call("GET", f"/v1/jobs/{other}")["budgets"] == budgets

    (left,) = told(home, script, "agent-left")
    assert "so it runs to its end" in left["message"] and not told(home, script, "agent-stopped")
    (tmp_path / "end").touch()
    assert home.wait_succeeded(script)["attempt"] == 1


@full
def test_service_downgrade_resumes_jobs_with_cause_upgrade(home: Home, tmp_path: Path) -> None:
    """The database is of one revision: both ways are the same. What the new one's agents write is not understood."""
    newer = copy_with_protocol(tmp_path / "newer", PROTOCOL_VERSION + 1)
    home.serve(newer, newer)
    home.ready()
    job_id = home.submit(steps=100_000, every=100_000)
    home.wait(job_id, lambda job: job["progress"]["step"] > 20, "progress")
    home.kill()
    home.serve(ROOT, ROOT)
    home.ready()
    home.wait(job_id, lambda job: job["attempt"] == 2 and job["phase"] == "RUNNING", "the second attempt")
    first = home.call("GET", f"/v1/jobs/{job_id}/attempts/1")
    assert (first["cause"], first["steps_lost"]) == ("upgrade", 0) and committed_steps(home, job_id) == [
        first["last_step"]
    ]
    home.call("POST", f"/v1/jobs/{job_id}/cancel")
    home.wait(job_id, lambda job: job["phase"] == "CANCELLED", "the cancel")


def test_agent_of_another_protocol_ends_with_cause_upgrade_and_advice(tmp_path: Path, jobs: list[Job]) -> None:
    other = copy_with_protocol(tmp_path / "other", PROTOCOL_VERSION + 1)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={version_environment(other)["PYTHONPATH"]} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = Job(tmp_path, {"task": {"entrypoint": "a:B"}, "python": str(python)})
    jobs.append(job)
    result = job.launch(resolved=RESOLVED.model_copy(update={"python": str(python)})).wait()
    assert result.cause is Cause.UPGRADE and result.message is not None
    assert f"protocol {PROTOCOL_VERSION + 1}, the service uses {PROTOCOL_VERSION}" in result.message
    assert "ratchet-train[worker]" in result.message and "then continues from its last checkpoint" in result.message
