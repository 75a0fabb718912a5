"""Jobs whose ranks and agents are killed, under a service that is killed too: a tracker has one run of each, with each step once
and the values of an undisturbed job. ``make trackers N=100`` draws any number of kills."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ratchet_contract.phases import JobPhase
from tests.support.control_plane import Plane
from tests.support.mlflow_server import histories, mlflow_server
from tests.support.server import wait_for
from tests.support.tracker_readers import Points, read_tensorboard
from tests.support.wandb_files import read as read_wandb

FEW = 7
KILLS = int(os.environ.get("RATCHET_TEST_TRACKER_KILLS", FEW))
SEED = int(os.environ.get("RATCHET_TEST_SEED", "1"))
STEPS, EVERY = 60, 10
PER_JOB, JOBS = 3, min(4, KILLS // 3)
"""Kills of a job's ranks and agents; jobs at the same time, whose service is killed once."""
pytestmark = [
    pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(60 + 30 * KILLS),
    pytest.mark.parametrize("migrated_database", ["sqlite", *(["postgresql"] if KILLS > FEW else [])], indirect=True),
]  # fmt: skip


class Tracker(NamedTuple):
    """``variables``: of a service that has it; ``read``: the points of a job's one run."""

    variables: dict[str, str]
    read: Callable[[str], Points]


@pytest.fixture
def trackers(tmp_path: Path) -> Iterator[dict[str, Tracker]]:
    def in_wandb(job: str) -> Points:
        [directory] = (tmp_path / "wandb" / job).glob("offline-run-*")
        points: Points = {}
        for step, values in read_wandb(directory).rows:
            for name, value in values.items():
                points.setdefault(name, []).append((step, value))
        return points

    def in_mlflow(job: str) -> Points:
        [points] = histories(server.url, job)
        return points

    board = Tracker(
        {"RATCHET_TRACKER_TENSORBOARD_DIR": str(tmp_path / "runs")},
        lambda job: read_tensorboard(tmp_path / "runs" / "ratchet" / job)[0],
    )
    with mlflow_server(tmp_path) as server:
        yield {
            "tensorboard": board,
            "mlflow": Tracker({"RATCHET_TRACKER_MLFLOW_URI": server.url}, in_mlflow),
            "wandb": Tracker({"RATCHET_TRACKER_WANDB_DIR": str(tmp_path / "wandb")}, in_wandb),
        }


def drawn_plan(draw: random.Random, kills: int) -> dict[str, Any]:
    """Attempts that are killed at steps that the job has not passed for sure, so that all of the kills happen."""
    faults = {
        str(number + 1): {"at": draw.randint(1 + number * EVERY, STEPS - 1), "do": draw.choice(("kill", "kill-agent"))}
        for number in range(kills)
    }
    for number in range(1, kills):  # a checkpoint at the step of a kill is past it
        faults[str(number + 1)]["at"] = max(
            faults[str(number + 1)]["at"], faults[str(number)]["at"] // EVERY * EVERY + 1
        )
    return {"steps": STEPS, "every": EVERY, "pause": 0.01, "metrics": True, "epochs": faults}


def is_exported(plane: Plane, job: str, trackers: int) -> bool:
    found = plane.get(f"/v1/jobs/{job}/trackers")["items"]
    return len(found) == trackers and all(run["done"] for run in found)


def test_killed_jobs_have_one_run_with_each_step_once(
    trackers: dict[str, Tracker],
    tmp_path: Path,
    control_plane: Plane,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, killed = random.Random(SEED), 0
    for tracker in trackers.values():
        for name, value in tracker.variables.items():
            monkeypatch.setenv(name, value)
    process = control_plane.start_process()
    undisturbed = control_plane.submit(drawn_plan(draw, 0))
    jobs = [undisturbed]
    while killed < KILLS:
        plans = [drawn_plan(draw, PER_JOB) for _ in range(JOBS)]
        batch = [control_plane.submit(plan, policy={"max_failures": 20, "backoff": 0.05}) for plan in plans]
        time.sleep(draw.uniform(0.5, 4.0))  # at any moment of them
        process.kill()
        process.wait(10)
        process = control_plane.start_process()
        for job in batch:
            control_plane.wait(job, JobPhase.SUCCEEDED, deadline=120)
            assert len(control_plane.attempts(job)) == PER_JOB + 1
        killed += 1 + PER_JOB * JOBS
        jobs += batch
    control_plane.wait(undisturbed, JobPhase.SUCCEEDED, deadline=60)
    for job in jobs:
        wait_for(lambda job=job: is_exported(control_plane, job, len(trackers)), f"the export of {job}", 120)  # type: ignore[misc]
    points = 0
    for name, tracker in trackers.items():
        expected = reported(tracker.read(undisturbed))
        assert {*expected} == {"loss", "nan"}
        for job in jobs:
            found = reported(tracker.read(job))
            for series in found.values():
                assert [step for step, _ in series] == [*range(1, STEPS + 1)], (name, job)
            assert repr(found) == repr(expected), (name, job)  # NaN
            points += sum(map(len, found.values()))
    print(f"{killed} kills, {len(jobs)} jobs, {len(trackers)} trackers, {points} points: none missing, none twice")
    if (log := tmp_path / "server.log").exists():
        print(f"{log.read_text().count('POST /api')} requests to MLflow")


def reported(points: Points) -> Points:
    """Those of the job; not those of its end."""
    return {name: series for name, series in sorted(points.items()) if not name.startswith(("ratchet/", "_"))}
