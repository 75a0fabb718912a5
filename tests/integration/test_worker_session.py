"""A user's script with its own loop and a Session, beside modules named like parts of Ratchet: exact under the same stops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.exit_codes import EXIT_PREEMPTED
from ratchet_contract.phases import Cause, Desired
from ratchet_store.compare import compare, render
from tests.support.launch import Attempt, Job
from tests.support.projects import make_project
from tests.support.server import wait_for

STEPS = 30
HOOK = {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 4}


def _job(tmp_path: Path, job_id: str, *arguments: str) -> Job:
    project = make_project(tmp_path / "project")
    spec = {
        "script": ["train.py", "--steps", str(STEPS), *arguments],
        "code": {"path": str(project)},
        "hook": HOOK,
        "ddp": {"bucket_cap_mb": 0.003},
        "checkpoint": {"every_steps": 10},
    }
    return Job(tmp_path, spec, project, job_id=job_id)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[tuple[Job, Job]]:
    gate = tmp_path / "gate"
    gate.mkdir()
    both = _job(tmp_path, "whole"), _job(tmp_path, "cut", "--hold", "12", "20", "--gate", str(gate))
    yield both
    for job in both:
        job.close()


def _wish_while_held(attempt: Attempt, gate: Path, step: int, round_: int, **wish: Any) -> None:
    held = [gate / f"held{step}.{r}" for r in range(2)]
    wait_for(lambda: all(p.exists() for p in held), f"step {step}\n{attempt.logs()}", 60)
    attempt.control(**wish)
    attempt.wait_freeze(round_)
    (gate / f"go{step}").touch()


def test_save_now_then_suspend_then_resume_ends_like_the_undisturbed_script(
    jobs: tuple[Job, Job], tmp_path: Path
) -> None:
    whole, cut = jobs
    attempt = whole.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert "after the loop" in attempt.paths.log(0).read_text()

    # Held in the bodies of two steps, until both ranks are in the freeze: what is agreed on there is acted on behind them.
    attempt = cut.launch()
    _wish_while_held(attempt, tmp_path / "gate", 12, 0, checkpoint_request=1)
    _wish_while_held(attempt, tmp_path / "gate", 20, 1, checkpoint_request=1, desired=Desired.SUSPEND)
    result = attempt.wait()
    assert (result.cause, result.exit_code, result.last_step) == (Cause.API_SUSPEND, EXIT_PREEMPTED, 21), attempt.logs()
    saves = [(m.step, m.reason) for m in attempt.messages(kind="checkpoint")]
    assert saves == [(10, "schedule"), (13, "request"), (20, "schedule"), (21, "stop")]

    attempt = cut.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert attempt.report().verdict == "exact"
    assert {c.component for c in attempt.report().components} >= {
        "user:noise",
        "user:average",
        "optimizer",
        "data",
        "hook",
    }
    comparison = compare(whole.newest(), cut.newest())
    assert comparison.identical, render(comparison)
    assert cut.newest().name.startswith(f"step-{STEPS:012d}")
    assert whole.attempts[0].metrics()[24]["right"] == {**cut.attempts[0].metrics(), **attempt.metrics()}[24]["right"]
