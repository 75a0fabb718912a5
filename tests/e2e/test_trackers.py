"""Jobs whose ranks and agents are killed, under a service that is killed too: a tracker has one run of each, with each step once
and the values of an undisturbed job. ``make trackers N=100`` draws any number of kills."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ratchet_contract.phases import JobPhase
from ratchet_service.db.engine import Database
from tests.support.control_plane import Plane
from tests.support.server import wait_for
from tests.support.tracker_readers import Points, read_tensorboard

KILLS = int(os.environ.get("RATCHET_TEST_TRACKER_KILLS", "8"))
SEED = int(os.environ.get("RATCHET_TEST_SEED", "1"))
STEPS, EVERY = 60, 10
PER_JOB, JOBS = 3, 4
"""Kills of a job's ranks and agents; jobs at the same time, whose service is killed once."""
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(60 + 30 * KILLS)]


class Tracker(NamedTuple):
    """``variables``: of a service that has it, with a directory of the test; ``read``: the points of a run."""

    name: str
    variables: Callable[[Path], dict[str, str]]
    read: Callable[[Path, str], Points]


TRACKERS = (
    Tracker(
        "tensorboard",
        lambda place: {"RATCHET_TRACKER_TENSORBOARD_DIR": str(place)},
        lambda place, job: read_tensorboard(place / "ratchet" / job)[0],
    ),
)


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


def is_exported(plane: Plane, job: str) -> bool:
    found = plane.get(f"/v1/jobs/{job}/trackers")["items"]
    return len(found) == len(TRACKERS) and all(run["done"] for run in found)


def test_killed_jobs_have_one_run_with_each_step_once(
    tmp_path: Path, control_plane: Plane, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, draw, killed = tmp_path / "runs", random.Random(SEED), 0
    for tracker in TRACKERS:
        for name, value in tracker.variables(place).items():
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
        wait_for(lambda job=job: is_exported(control_plane, job), f"the export of {job}", 60)  # type: ignore[misc]
    for tracker in TRACKERS:
        expected = tracker.read(place, undisturbed)
        assert [step for step, _ in expected["loss"]] == [*range(1, STEPS + 1)]
        for job in jobs:
            assert repr(tracker.read(place, job)) == repr(expected), (tracker.name, job)  # NaN
    print(f"{killed} kills, {len(jobs)} jobs, {len(TRACKERS)} trackers: each step once")
