"""Agents in the hands of an agent host: the service goes and comes back beside them, and they go with a checkpoint."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_service.launchers.local.agent_host_client import SOCKET
from ratchet_store.read.compare import compare, render
from tests.e2e.exactness import final_checkpoint
from tests.support.agent_host import APART, COMMAND, AgentHost, launchers_file
from tests.support.launch import wait_freeze
from tests.support.server import Server, wait_for
from tests.support.user_projects import make_project

pytestmark = pytest.mark.slow

SECRET = "the-password-of-the-database"
LOOK_AROUND = """
import os, sys
from pathlib import Path
found = [name for name, value in os.environ.items() if "the-password" in value or name.startswith("PG")]
seen = 0
for entry in Path("/proc").iterdir():
    if entry.name.isdigit():
        try:
            text = (entry / "environ").read_bytes()
        except OSError:
            continue
        seen += 1
        if b"the-password" in text:
            found.append((entry / "cmdline").read_bytes().decode().replace("\\0", " "))
Path(sys.argv[1]).write_text(f"{seen > 1} {found}")
"""
HOOK = """
import os
from pathlib import Path
Path(os.environ["LEFT"]).touch()
def f(state, bucket): ...
class T:
    def build(self, ctx): ...
    def loss(self, model, batch): ...
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[AgentHost]:
    (tmp_path / "home").mkdir(mode=0o700)
    made = AgentHost(tmp_path / "home")
    yield made
    if made.process is not None:
        made.kill()


@pytest.fixture
def service(host: AgentHost, tmp_path: Path) -> Iterator[Server]:
    server = Server(host.home, "--launchers", str(launchers_file(tmp_path)))
    yield server
    server.stop()


def end_orderly(server: Server) -> None:
    assert server.process is not None
    server.process.terminate()
    assert server.process.wait(30) == 0


def test_training_survives_service_restart_and_agent_host_preemption_exactly(
    host: AgentHost, service: Server, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    for step in (13, 19, 22):
        (gate / f"step{step}").touch()
    spec: dict[str, Any] = {
        "name": "hosted", "code": {"path": str(make_project(tmp_path / "code"))},
        "world": {"ranks_per_node": 2, "device": "cpu"},
        "hook": {"name": "powerSGD", "start_powerSGD_iter": 6}, "checkpoint": {"every_steps": 6},
        "policy": {"backoff": 0.05, "max_failures": 1},
    }  # fmt: skip
    task = {"entrypoint": "mine:Mine", "args": {"steps": 26}}
    host.start()
    service.start()
    quiet = service.submit({**spec, "task": task})
    job = service.submit({**spec, "task": {**task, "args": {"steps": 26, "gate": str(gate)}}})

    def wait_at(step: int) -> None:
        wait_for(lambda: all((gate / f"step{step}.reached.{rank}").exists() for rank in (0, 1)), f"step {step}", 90)

    wait_at(13)
    service.wait_phase(quiet, "SUCCEEDED")
    end_orderly(service)
    (gate / "step13").unlink()
    wait_at(19)  # without a service
    service.start()
    assert [a["number"] for a in service.attempts(job)] == [1]

    host.terminate()
    wait_freeze(service.paths.job(job).attempt(1), 0, proc=host.proc)
    (gate / "step19").unlink()
    assert host.wait() == 0, host.log.read_text()
    told = lambda: [e for e in service.events(job) if e["type"] == "engine-unreachable"]  # noqa: E731
    wait_for(told, "the job to tell that no agent host answers")
    assert "ratchet agent-host" in told()[0]["message"]
    host.start()
    wait_at(22)
    (first, *_) = service.attempts(job)
    assert (first["outcome"], first["cause"], first["steps_lost"]) == ("preempted", "sigterm", 0), first
    if APART:  # by force, as a container is killed, or a machine goes
        host.kill()
        host.start()
        wait_for(lambda: len(service.attempts(job)) == 3, "another attempt")
    (gate / "step22").unlink()
    ended = service.wait_phase(job, "SUCCEEDED")
    attempts = service.attempts(job)
    assert attempts[1]["base"] == {**attempts[1]["base"], "step": 19, "attempt": 1}
    if APART:
        assert (attempts[1]["outcome"], attempts[1]["cause"]) == ("preempted", "node-lost"), attempts[1]
    assert ended["budgets"]["failures"] == 0, ended
    report = compare(final_checkpoint(service, quiet), final_checkpoint(service, job))
    assert report.identical, render(report)


@pytest.mark.skipif(not APART, reason="needs root for processes of its own")
def test_job_code_cannot_read_the_environment_of_the_service(
    host: AgentHost, service: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, left = tmp_path / "code", tmp_path / "out", tmp_path / "left"
    code.mkdir()
    (code / "look.py").write_text(LOOK_AROUND)
    (code / "mine.py").write_text(HOOK)
    host.start()
    monkeypatch.setenv("PGPASSWORD", SECRET)
    service.start()
    common = {"code": {"path": str(code)}, "world": {"ranks_per_node": 1, "device": "cpu"}}
    job = service.submit({"name": "looks", "script": ["look.py", str(out)], **common})
    hook = {"hook": {"name": "custom", "hook": "mine:f"}, "task": {"entrypoint": "mine:T"}, "env": {"LEFT": str(left)}}
    answer = service.call("POST", "/v1/jobs?dry_run=true", json={"name": "hook", **common, **hook}).json()
    assert "hook-not-checked" in {w["code"] for w in answer["warnings"]} and not left.exists()
    service.wait_phase(job, "SUCCEEDED")
    assert out.read_text() == "True []"


def test_agent_host_is_unique_per_run_directory_and_private_to_the_user(host: AgentHost, service: Server) -> None:
    with pytest.raises(AssertionError, match="no agent host has run in"):
        service.start()
    host.start()
    assert (host.home / "machine.json").exists(), "a service that starts once the host answers would be refused"
    second = subprocess.run([*COMMAND, str(host.home)], timeout=60, capture_output=True, text=True)
    assert second.returncode == 2 and "an agent host already runs in" in second.stderr
    assert (host.home / SOCKET).stat().st_mode & 0o777 == 0o600
    host.terminate()
    assert host.wait() == 0 and not (host.home / SOCKET).exists()
    assert (host.home / "machine.json").exists()
