"""A user's own directory, beside modules named ``hooks``, ``worker`` and ``service``, is exact under the same kills, also when it
is edited between attempts: a job runs the code it was submitted with."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.exactness import Kill, Outcome, judge, run_interrupted, run_undisturbed
from tests.support.fork_server import LIBRARIES
from tests.support.full_matrix import full
from tests.support.server import Server

AGENTS = LIBRARIES
PROJECT = Path(__file__).parents[2] / "examples" / "user_project"
EPOCHS, STEPS_PER_EPOCH, EVERY, START = 18, 14, 30, 75
STEPS = EPOCHS * STEPS_PER_EPOCH
WAYS: dict[str, dict[str, Any]] = {
    "task": {"task": {"entrypoint": "my_task:TumourTask", "args": {"epochs": EPOCHS}}},
    "script": {"script": ["train.py", "--epochs", str(EPOCHS)]},
}


def spec(way: str, project: Path) -> dict[str, Any]:
    return {
        "name": f"user-{way}",
        "code": {"path": str(project)},
        **WAYS[way],
        "world": {"ranks_per_node": 2, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "hook": {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": START},
        "checkpoint": {"every_steps": EVERY, "keep_last": 3},
        "policy": {"max_failures": 5, "backoff": 0.1},
        "seed": 3,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kills"),
    [
        pytest.param("task", [("rank", START + 20)], marks=full),
        ("script", [("sigterm", 180)]),
    ],
)
def test_user_code_edited_after_submission_does_not_affect_the_job(
    server: Server, tmp_path: Path, way: str, kills: list[tuple[Kill, int]]
) -> None:
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__"))
    reference = run_undisturbed(server, spec(way, project))

    def edit() -> None:
        for file in project.glob("*.py"):
            file.write_text("raise RuntimeError('edited after the job was submitted')\n")

    outcome = Outcome(kills)
    job_id = run_interrupted(server, spec(way, project), kills, random.Random(1), meanwhile=edit)
    judge(server, job_id, reference, outcome, total=STEPS, every=EVERY, start=START)
    assert not outcome.problems and outcome.late is None
