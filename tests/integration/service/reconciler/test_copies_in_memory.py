"""A job with copies in memory under the service: a killed rank's attempt is followed by one that continues from its copies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.full_matrix import full
from tests.support.server import Server, rank_pid, wait_for

CODE = Path(__file__).parents[3] / "support" / "fault_job"


@pytest.fixture(params=["off", pytest.param("on", marks=full)], ids=["started", "parked"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "home", "--standby", request.param, afresh=request.param == "on")
    yield made.start()
    made.stop()


def test_killed_rank_is_continued_from_its_copies(service: Server, tmp_path: Path) -> None:
    held = [21]
    job_id = service.submit(
        {
            "name": "copies",
            "code": {"path": str(CODE)},
            "task": {"entrypoint": "fault_task:Faulty", "args": {"steps": 30, "gate": str(tmp_path), "held": held}},
            "world": {"ranks_per_node": 2, "device": "cpu"},
            "checkpoint": {"every_steps": 1000, "first": "off", "memory_every_steps": 1},
            "policy": {"backoff": 0.1},
        }
    )
    _, paths = service.wait_step(job_id, 20)
    os.kill(rank_pid(paths, 1), signal.SIGKILL)
    wait_for(
        lambda: service.attempts(job_id)[0]["cause"], "the end of the first attempt, which finishes no further step", 60
    )
    (tmp_path / "go.21").touch()
    service.wait_phase(job_id, "SUCCEEDED")
    first, second = service.attempts(job_id)
    assert first["cause"] == "rank-killed" and first["steps_lost"] in (0, 1)
    assert "was saved from the copies in memory" in first["message"]
    base = second["resume_report"]["base"]
    assert base["step"] == 20 - first["steps_lost"] and base["attempt"] == 1
    stored = service.call("GET", f"/v1/jobs/{job_id}/checkpoints").json()["items"]
    assert {item["step"]: item["reason"] for item in stored} == {base["step"]: "memory", 30: "end"}
    events = {event["type"] for event in service.events(job_id)}
    assert "note.checkpoint-from-memory" in events and "checkpoint-adopted" not in events
