"""Advice of the service: what is refused or ended is provoked, the cure that its message names is made, and the trouble is gone.

The hints of the command line itself: ``tests/e2e/test_hints.py``."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ratchet_contract.phases import JobPhase
from ratchet_service.json_merge_patch import merge
from tests.support.cli import Cli, Result
from tests.support.control_plane import Plane, trainer_spec
from tests.support.server import Server

one_database = pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
SPEC = {
    "name": "advised", "script": ["train.py"], "code": {"path": "CODE"},
    "world": {"ranks_per_node": 1, "device": "cpu"}, "resources": {"cpus_per_rank": 1},
}  # fmt: skip
SESSION = "from ratchet_worker.session import Session\n\nsession = Session()\n"
REFUSED: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "thread-conflict": ({"env": {"OMP_NUM_THREADS": "3"}}, "set only one", {"env": None}),
    "backend-device": ({"ddp": {"backend": "nccl"}}, "use backend gloo (or auto)", {"ddp": {"backend": "gloo"}}),
    "no-gpu": ({"world": {"device": "cuda"}}, "set world.device to cpu or auto", {"world": {"device": "auto"}}),
    "too-many-nodes": ({"world": {"nodes": 2}}, "use world.ranks_per_node", {"world": {"nodes": 1, "ranks_per_node": 2}}),
    "unknown-hook": ({"hook": "powerSG"}, "powerSGD", {"hook": "powerSGD"}),
    "unknown-key": ({"checkpoint": {"every_step": 5}}, "every_steps", {"checkpoint": {"every_step": None, "every_steps": 5}}),
    "python-not-found": ({"python": "venv"}, "name its full path", {"python": sys.executable}),
    "script-not-found": ({"script": ["other.py"]}, "train.py", {"script": ["train.py"]}),
    "include-not-found": ({"code": {"include": ["data.csv"]}}, "data.csv", {"code": {"include": ["train.py"]}}),
    "limit-too-low": ({"resources": {"memory": "100Mi"}}, "request more", {"resources": {"memory": "2Gi"}}),
    "launcher-not-here": ({"launcher": {"kind": "slurm"}}, "it has local", {"launcher": {"kind": "local"}}),
    "tracker-not-here": ({"tracking": {"to": ["mlflow"]}}, "it has none", {"tracking": {"to": None}}),
    "secret-missing": (
        {"secrets": {"KEY": {"from_env": "NOWHERE"}}}, "set it where the service is started",
        {"secrets": {"KEY": {"from_env": "HOME"}}},
    ),
    "hook-needs-session": ({"script": ["plain.py"], "hook": "powerSGD"}, "Session", {"script": ["train.py"]}),
}  # fmt: skip


@pytest.fixture
def code(tmp_path: Path) -> Path:
    made = tmp_path / "code"
    made.mkdir()
    (made / "train.py").write_text(SESSION)
    (made / "plain.py").write_text("import torch.distributed as dist\n\ndist.init_process_group()\n")
    return made


def test_refused_spec_with_the_advised_change_is_accepted(server: Server, code: Path) -> None:
    def planned(*changes: dict[str, Any]) -> httpx.Response:
        spec: Any = SPEC
        for change in changes:
            spec = merge(spec, change)
        text = yaml.safe_dump(spec).replace("CODE", str(code))
        headers = {"Content-Type": "application/yaml"}
        return httpx.post(f"{server.url}/v1/jobs?dry_run=true", content=text, headers=headers, timeout=60)

    wrong = []
    for code_, (fault, advice, cure) in REFUSED.items():
        refused, taken = planned(fault), planned(fault, cure)
        told = [e for e in refused.json().get("errors", ()) if e["code"] == code_ and advice in e["detail"]]
        if not told or taken.status_code != 200:
            errors = [answer.json().get("errors") for answer in (refused, taken)]
            wrong.append(f"{code_}: {errors}")
    assert not wrong, "\n".join(wrong)


class Told:
    """Somebody who types what a message says."""

    def __init__(self, plane: Plane, directory: Path) -> None:
        self.plane, self.cli = plane, Cli(plane.settings.home, directory)

    def follow(self, text: str, **values: str) -> list[Result]:
        commands = re.findall(r"`(ratchet [^`]*)`", text)
        assert commands, text
        for name, value in values.items():
            commands = [re.sub(rf"\b{name}\b", value, command) for command in commands]
        return [self.cli(*shlex.split(command)[1:]) for command in commands]

    def ended(self, job_id: str, reason: str) -> str:
        """What a job says of its end for that reason."""
        job = self.plane.wait_job(job_id, lambda job: job.phase is JobPhase.FAILED, "to fail")
        assert job.reason == reason and job.message is not None
        return job.message


@one_database
def test_ended_job_continues_with_the_commands_of_its_message(control_plane: Plane, tmp_path: Path) -> None:
    control_plane.start_reconciler()
    told = Told(control_plane, tmp_path)
    out_of_time = control_plane.submit({"steps": 100_000, "every": 10, "pause": 0.01}, policy={"timeout": 1})
    unsaved = control_plane.submit(
        {"steps": 100, "every": 50, "epochs": {str(n): {"at": 7, "do": "raise"} for n in range(1, 9)}}
    )
    text = told.ended(out_of_time, "timeout")
    _, fork = told.follow(text, SECONDS="600")
    forked = control_plane.job(fork.text.strip())
    assert forked.spec["policy"]["timeout"] == 600
    control_plane.wait_job(forked.id, lambda job: job.phase is JobPhase.RUNNING, "runs")
    text = told.ended(unsaved, "no-progress")
    assert (
        "did 7 new steps" in text
        and "submit it again (it has no checkpoint to fork) with `--set checkpoint.every_steps=N`" in text
    )
    told.follow(text)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(trainer_spec({"steps": 3})))
    told.cli("submit", "job.yaml", "--set", "checkpoint.every_steps=2", "--wait")
    told.cli("cancel", forked.id)
    for job_id in (forked.id, out_of_time, unsaved):
        control_plane.wait_job(job_id, lambda job: job.phase.terminal, "to end")


@one_database
def test_job_in_backoff_suspended_and_resumed_is_tried_at_once(control_plane: Plane, tmp_path: Path) -> None:
    """As docs/troubleshooting.md says."""
    control_plane.start_reconciler()
    told = Told(control_plane, tmp_path)
    fails = {str(n): {"at": 1, "do": "raise"} for n in (1, 2)}
    job_id = control_plane.submit({"steps": 30, "epochs": fails}, policy={"backoff": 290})
    waits = control_plane.wait_job(job_id, lambda job: job.reason == "backoff", "backs off")
    assert waits.attempt < 3
    told.cli("suspend", job_id)
    told.cli("resume", job_id)
    control_plane.wait_job(job_id, lambda job: job.attempt > waits.attempt, "is tried again")


@one_database
def test_delete_of_a_fork_source_succeeds_with_the_advised_option(control_plane: Plane, tmp_path: Path) -> None:
    told = Told(control_plane, tmp_path)
    reconciler = control_plane.start_reconciler()
    source = control_plane.submit({"steps": 10}, policy={"max_preemptions": 3})
    control_plane.wait(source, JobPhase.SUCCEEDED)
    reconciler.stop()  # so that the fork waits
    control_plane.reconcilers[0][1].join(60)
    fork = told.cli(
        "fork", source, "--set", "priority=-5", "--set", "env.AGAIN=1", "--set", "policy.max_preemptions=null"
    ).text.strip()
    assert control_plane.job(fork).spec["policy"]["max_preemptions"] is None, "as docs/troubleshooting.md says"
    refused = told.cli("delete", source, expect=4)
    assert "keep the checkpoints" in refused.errors
    told.cli("delete", source, "--keep-checkpoints")
