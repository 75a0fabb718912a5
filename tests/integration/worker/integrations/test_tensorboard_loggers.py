"""The TensorBoard loggers of Lightning, Accelerate and Hugging Face's Trainer, killed: one directory, each step once, with the
values of an undisturbed run.

RATCHET_TEST_LOGGING=N: N jobs of each with drawn kills, and the control without Ratchet's writer (``make own-logging N=100``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.support.event_logs import Points, doubles, series
from tests.support.fork_server import LIBRARIES
from tests.support.launch import Job
from tests.support.logging_runs import ROUNDS, draw_kills, run
from tests.support.optional_packages import skip_if_missing

pytestmark = skip_if_missing("tensorboard")
STEPS: Final = 24
MEASURED: Final = ("runtime", "_per_second")
FRAMEWORKS: Final = {"lightning": "lightning", "accelerate": "accelerate", "trainer": "transformers"}
SHOWN: Final = {"lightning": "loss", "accelerate": "loss", "trainer": "train/loss"}


def logged(job: Job) -> dict[str, Points]:
    """All points, without the values of measured times, and without the job's id in a directory's name."""
    found = series(job.paths.work_dir).items()
    return {
        name.replace(job.job_id, "JOB"): [(step, 0.0 if name.endswith(MEASURED) else value) for step, value in points]
        for name, points in found
    }


@pytest.mark.timeout(120 + 60 * ROUNDS)
@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=skip_if_missing(FRAMEWORKS[name])) for name in FRAMEWORKS]
)
def test_tensorboard_of_a_killed_framework_job_shows_each_step_once(
    jobs: list[Job], tmp_path: Path, framework: str
) -> None:
    script = [f"{framework}_board.py", "own"]
    whole = logged(run(jobs, tmp_path / "whole", script, [], interpreters=LIBRARIES))
    (shown,) = [points for name, points in whole.items() if name.endswith(f":{SHOWN[framework]}")]
    assert len(shown) == STEPS and doubles(shown) == 0
    for seed in range(ROUNDS):
        kills = draw_kills(seed, STEPS) if ROUNDS > 1 else ["1:8"]
        job = run(jobs, tmp_path / str(seed), script, kills, interpreters=LIBRARIES)
        assert logged(job) == whole, kills
        jobs.pop().close()


@pytest.mark.skipif(ROUNDS == 1, reason="the control: make own-logging runs it")
@pytest.mark.timeout(120 + 60 * ROUNDS)
@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=skip_if_missing(FRAMEWORKS[name])) for name in FRAMEWORKS]
)
def test_frameworks_own_writer_shows_repeated_steps_twice(jobs: list[Job], tmp_path: Path, framework: str) -> None:
    total = 0
    for seed in range(ROUNDS):
        script = [f"{framework}_board.py", "plain"]
        job = run(jobs, tmp_path / str(seed), script, draw_kills(seed, STEPS), interpreters=LIBRARIES)
        found = [points for name, points in logged(job).items() if name.endswith(f":{SHOWN[framework]}")]
        total += doubles([point for points in found for point in points])  # in several directories, perhaps
        jobs.pop().close()
    print(f"{framework}: {total} doubles in {ROUNDS} jobs of {STEPS} steps")
    assert total > 0
