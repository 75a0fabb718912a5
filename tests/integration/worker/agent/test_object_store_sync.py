# ruff: noqa: F811  (fixtures)
"""``checkpoint.uri`` in an attempt: a real agent and a rank without torch, on a real S3 server that can be told to fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.paths import MANIFEST_NAME, AttemptPaths, HomePaths
from ratchet_contract.protocol.messages import AttemptResult, LaunchFile
from ratchet_contract.spec.parse import parse_spec
from ratchet_store.object_store.remote_checkpoints import open_job_checkpoints
from ratchet_worker.ipc.progress_counter import CounterReader
from tests.support.fake_trainer import AGENT
from tests.support.launch import RESOLVED
from tests.support.object_stores import BUCKET, PATIENT, S3Server, s3, s3_server  # noqa: F401
from tests.support.server import agent_pid, processes_below, wait_for

URI = f"s3://{BUCKET}/team"
JOB = "job-000000000001"
ROOT = Path(__file__).parents[4]


class Attempts:
    """Attempts of one job, each with what the service would know."""

    def __init__(self, root: Path) -> None:
        self.home = HomePaths(root / "home")
        self.job = self.home.job(JOB)
        self.number = 0
        self.processes: list[subprocess.Popen[bytes]] = []

    def launch(self, trainer: dict[str, Any], **more: Any) -> AttemptPaths:
        self.number += 1
        paths = self.job.attempt(self.number)
        policy = {"startup_deadline": 3, "stop_grace": 20, **more.pop("policy", {})}
        spec = {
            "name": "copied",
            "task": {"entrypoint": "a.b:C"},
            "world": {"ranks_per_node": 1, "device": "cpu"},
            "env": {"TRAINER": json.dumps(trainer)},
            "checkpoint": {"uri": URI},
            "policy": policy,
        }
        launch = LaunchFile(
            job_id=JOB, attempt=self.number, world_size=1, ranks=[0], spec=parse_spec(spec), resolved=RESOLVED,
            job_root=str(self.job.root), attempt_dir=str(paths.root), workdir=str(self.job.work_dir), report_token="none",
            service_file=str(self.home.service_file), **more,
        )  # fmt: skip
        paths.root.mkdir(parents=True)
        paths.launch_file.write_text(launch.model_dump_json())
        with paths.agent_log.open("ab") as log:
            command, env = [*AGENT, str(paths.launch_file)], os.environ | {"PYTHONPATH": str(ROOT)}
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env))
        return paths

    def end(self, paths: AttemptPaths) -> AttemptResult:
        wait_for(lambda: self.processes[-1].poll() is not None, "the agent to end", 60)
        assert paths.result_file.exists(), paths.agent_log.read_text()
        return AttemptResult.model_validate_json(paths.result_file.read_bytes())

    def there(self) -> list[str]:
        """What is whole in the store, oldest first."""
        listing = open_job_checkpoints(URI, JOB, PATIENT).list_checkpoints()
        return sorted(f"{step}.{attempt}" for (step, attempt), names in listing.items() if "MANIFEST.json" in names)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)
        for pid in processes_below(self.home.home):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def attempts(s3: S3Server, tmp_path: Path) -> Iterator[Attempts]:
    made = Attempts(tmp_path)
    yield made
    made.close()


def said(paths: AttemptPaths, kind: str) -> list[dict[str, Any]]:
    """The agent's own messages: of a kind, or notes of a type."""
    if not paths.agent_spool.exists():
        return []
    lines = [json.loads(line) for line in paths.agent_spool.read_text().splitlines()]
    assert all(line["rank"] == -1 for line in lines)
    return [line for line in lines if kind in (line["kind"], line.get("type"))]


def recorded(attempts: Attempts, paths: AttemptPaths) -> dict[str, Any]:
    """What the service knows after an attempt: its lineage and the newest checkpoint."""
    found = [json.loads(line) for line in paths.spool(0).read_text().splitlines()]
    newest = [m for m in found if m["kind"] == "checkpoint"][-1]
    base = Base.model_validate_json(paths.base_file.read_bytes())
    segment = Segment(attempt=attempts.number, after_step=base.step)
    return {
        "lineage": [segment],
        "recorded": Base(step=newest["step"], attempt=newest["attempt"], digest=newest["digest"]),
    }


def test_every_checkpoint_is_uploaded_and_reported(attempts: Attempts) -> None:
    paths = attempts.launch({"steps": 20, "every": 10})
    assert attempts.end(paths).cause == "completed"
    assert attempts.there() == ["10.1", "20.1"]
    told = {m["step"]: m for m in said(paths, "checkpoint_uploaded")}
    assert sorted(told) == [10, 20]
    assert told[20]["uri"] == f"{URI}/{JOB}/checkpoints/step-000000000020.a0001"
    assert told[20]["digest"] == recorded(attempts, paths)["recorded"].digest


def test_unreachable_object_store_does_not_stop_training(attempts: Attempts, s3: S3Server) -> None:
    s3.fault = lambda _method, _path: "403"
    paths = attempts.launch({"steps": 60, "every": 10, "pause": 0.02})
    result = attempts.end(paths)
    assert (result.cause, result.last_step) == ("completed", 60)
    (failed,) = said(paths, "upload-failed")  # told once, not in every round
    assert "Made403" in failed["message"]
    assert not any(v in paths.agent_log.read_text() for k, v in s3.environ.items() if "KEY" in k)
    (missing,) = said(paths, "upload-incomplete")
    assert "step-000000000060.a0001" in missing["message"]


def test_lost_checkpoints_are_fetched_before_ranks_start(attempts: Attempts) -> None:
    first = attempts.launch({"steps": 40, "every": 10, "pause": 0.05})
    wait_for(lambda: (r := CounterReader(first.counter(0)).read()) is not None and r.finished >= 15, "step 15")
    os.kill(agent_pid(first), signal.SIGTERM)
    assert attempts.end(first).cause == "sigterm"
    known = recorded(attempts, first)
    step = known["recorded"].step
    assert f"{step}.1" in attempts.there()
    shutil.rmtree(attempts.job.checkpoints)
    second = attempts.launch({"steps": 40, "every": 10}, **known)
    result = attempts.end(second)
    assert (result.cause, result.last_step) == ("completed", 40)
    assert result.base == known["recorded"]
    (note,) = json.loads(second.fetch_notes_file.read_text())
    assert note.startswith(f"fetched from {URI}/{JOB}/checkpoints/step-{step:012d}.a0001")
    assert said(second, "checkpoint-fetched")


def test_attempt_starts_from_the_older_copy_if_the_newest_is_cut_short(attempts: Attempts) -> None:
    first = attempts.launch({"steps": 20, "every": 10})
    attempts.end(first)
    known = recorded(attempts, first)
    objects = open_job_checkpoints(URI, JOB, PATIENT).objects
    cut = next(name for name in objects.list("step-000000000020.a0001/") if name.endswith(".safetensors"))
    rest = objects.get(cut, 1 << 20)[:-1]
    objects.put(cut, [rest], len(rest), "")
    shutil.rmtree(attempts.job.checkpoints)
    second = attempts.launch({"steps": 30, "every": 10}, **known)
    result = attempts.end(second)
    assert (result.cause, result.last_step) == ("completed", 30)
    assert result.base is not None and result.base.step == 10
    assert "step-000000000020.a0001" in json.loads(second.fetch_notes_file.read_text())[0]


def test_unreachable_object_store_fails_attempt_instead_of_losing_steps(attempts: Attempts, s3: S3Server) -> None:
    first = attempts.launch({"steps": 20, "every": 10})
    attempts.end(first)
    known = recorded(attempts, first)
    s3.fault = lambda _method, _path: "403"
    here, away = attempts.job.checkpoints, attempts.job.root / "away"
    shutil.copytree(here, away)
    shutil.rmtree(here / "step-000000000020.a0001")  # what is left is older than what is recorded
    second = attempts.launch({"steps": 30, "every": 10}, **known)
    result = attempts.end(second)
    assert result.cause == "checkpoint-error"
    assert result.ranks == []
    assert result.message is not None and "startup_deadline" in result.message and "Made403" in result.message

    shutil.rmtree(here)
    away.rename(here)  # as new as the record: the store is not needed
    third = attempts.launch({"steps": 30, "every": 10}, **known)
    result = attempts.end(third)
    assert (result.cause, result.base) == ("completed", known["recorded"])
    (note,) = json.loads(third.fetch_notes_file.read_text())
    assert "could not be queried" in note


def test_attempt_starts_from_the_recorded_local_checkpoint_while_the_object_store_hangs(
    attempts: Attempts, s3: S3Server
) -> None:
    first = attempts.launch({"steps": 20, "every": 10})
    attempts.end(first)
    known = recorded(attempts, first)
    s3.fault = lambda _method, _path: "hang"
    second = attempts.launch({"steps": 30, "every": 10}, policy={"startup_deadline": 6}, **known)
    wait_for(lambda: second.fetch_notes_file.exists() or second.result_file.exists(), "the store to be given up", 30)
    assert second.fetch_notes_file.exists(), attempts.end(second)
    (note,) = json.loads(second.fetch_notes_file.read_text())
    assert "could not be queried" in note and "no checkpoint newer than step-000000000020.a0001 of this disk" in note
    s3.fault = None
    result = attempts.end(second)
    assert (result.cause, result.base) == ("completed", known["recorded"])


def test_stop_is_obeyed_while_the_object_store_hangs(attempts: Attempts, s3: S3Server) -> None:
    s3.fault = lambda _method, _path: "hang"
    segment = {"lineage": [Segment(attempt=1, after_step=0)], "recorded": Base(step=10, attempt=1, digest="0" * 64)}
    attempts.number = 1
    paths = attempts.launch({"steps": 10}, policy={"startup_deadline": 120}, **segment)
    assert s3.hung.wait(30)
    os.kill(agent_pid(paths), signal.SIGTERM)
    assert attempts.end(paths).cause == "sigterm"


def test_upload_cut_by_agent_kill_is_completed_by_next_attempt(attempts: Attempts, s3: S3Server) -> None:
    s3.fault = lambda method, path: "hang" if method == "PUT" and "MANIFEST" in path else None
    first = attempts.launch({"steps": 20, "every": 10})
    assert s3.hung.wait(30)
    os.kill(agent_pid(first), signal.SIGKILL)
    wait_for(lambda: attempts.processes[-1].poll() is not None and not processes_below(first.root), "it to be gone")
    assert attempts.there() == []
    s3.fault = lambda _method, _path: None
    second = attempts.launch({"steps": 30, "every": 10}, lineage=[Segment(attempt=1, after_step=0)])
    assert attempts.end(second).cause == "completed"
    assert attempts.there()[-1] == "30.2"
    whole = [step for step in (10, 20) if (attempts.job.checkpoint(step, 1) / MANIFEST_NAME).exists()]
    assert 10 in whole and [step for step in whole if f"{step}.1" not in attempts.there()] == []


__all__ = ["s3_server"]
