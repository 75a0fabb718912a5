"""A service with a tracker: its options, the specs that it accepts, and a real job whose rank is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.client import RatchetClient
from ratchet_service.config.settings import Settings
from ratchet_service.errors import StartError
from ratchet_service.trackers.open import open_sinks
from tests.support.cli import Cli
from tests.support.server import Server, rank_pid, wait_for
from tests.support.tracker_readers import read_tensorboard

SPEC: dict[str, Any] = {
    "name": "digits",
    "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"steps": 120}},
    "world": {"ranks_per_node": 2, "device": "cpu"},
    "hook": {"name": "powerSGD", "start_powerSGD_iter": 10},
    "checkpoint": {"every_steps": 20},
    "policy": {"backoff": 0.05},
}


def test_missing_package_is_named_before_the_service_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        StartError, match=r"--tensorboard-dir: the package tensorboard is not installed.*'ratchet-train\[tensorboard\]'"
    ):
        open_sinks(Settings(tmp_path, tensorboard_dir=tmp_path))
    assert open_sinks(Settings(tmp_path)) == []


@pytest.fixture
def tracked(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "home", "--tensorboard-dir", str(tmp_path / "runs"))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.mark.processes
def test_killed_job_has_the_curves_of_an_undisturbed_one(tracked: Server, tmp_path: Path) -> None:
    refused = tracked.call(
        "POST", "/v1/jobs", expect=422, json=SPEC | {"tracking": {"to": ["tensorboard", "mlflow"]}}
    ).json()
    [problem] = refused["errors"]
    assert (problem["pointer"], problem["code"]) == ("/tracking/to/1", "tracker-not-here")
    assert "it has tensorboard" in problem["detail"] and "--mlflow-uri" in problem["detail"]

    calm, killed = tracked.submit(SPEC), tracked.submit(SPEC)
    silent = tracked.submit(SPEC | {"tracking": {"to": []}})
    number, paths = tracked.wait_step(killed, 45)
    os.kill(rank_pid(paths, 1), signal.SIGKILL)
    tracked.kill()
    tracked.start()
    for job in (calm, killed, silent):
        tracked.wait_phase(job, "SUCCEEDED")
    cli = Cli(tracked.home, tmp_path)
    wait_for(lambda: " done " in cli("trackers", killed).text, "the export of the killed job", 30)
    wait_for(lambda: " done " in cli("trackers", calm).text, "the export of the other", 30)
    assert len(tracked.attempts(killed)) == number + 1
    points, texts = read_tensorboard(tmp_path / "runs" / "ratchet" / killed)
    assert {"loss", "ratchet/hook/compression_rate", "ratchet/hook/residual_norm"} <= points.keys()
    assert points.keys() == read_tensorboard(tmp_path / "runs" / "ratchet" / calm)[0].keys()
    assert points["loss"] == read_tensorboard(tmp_path / "runs" / "ratchet" / calm)[0]["loss"]
    for series in points.values():
        assert [step for step, _ in series] == sorted({step for step, _ in series})
    assert any("attempt 1 ended" in text for text in texts.values())
    assert "| hook.name | powerSGD |" in texts["ratchet/parameters"]
    assert "| environment.python |" in texts["ratchet/parameters"]
    assert "| status | SUCCEEDED |" in texts["ratchet/end"] and "goodput" in texts["ratchet/end"]

    with RatchetClient(home=tracked.home) as client:
        [run] = client.trackers(killed)
    assert (run.tracker, run.run, run.step, run.error) == ("tensorboard", killed, 120, None)
    assert run.place == str(tmp_path / "runs" / "ratchet" / killed)
    assert "no tracker" in cli("trackers", silent).errors
    tracked.call("DELETE", f"/v1/jobs/{killed}")
    assert read_tensorboard(tmp_path / "runs" / "ratchet" / killed)[0] == points
