"""Stops at awkward moments, and saves that fail. The task is a user's own, beside modules named like parts of Ratchet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.exit_codes import EXIT_CHECKPOINT_ERROR, EXIT_PREEMPTED
from ratchet_contract.phases import Cause, Desired
from ratchet_store.read.compare import compare, render
from tests.support.launch import Job
from tests.support.server import wait_for
from tests.support.user_projects import make_project

STEPS = 16


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    for job in made.jobs:
        job.close()


class Home:
    def __init__(self, path: Path) -> None:
        self.path, self.gate = path, path / "gate"
        self.gate.mkdir()
        self.project = make_project(path / "project")
        self.jobs: list[Job] = []

    def job(self, job_id: str, every: int | None, **args: Any) -> Job:
        spec = {
            "task": {"entrypoint": "mine:Mine", "args": {"steps": STEPS, **args}},
            "code": {"path": str(self.project)},
            "checkpoint": {"every_steps": every},
        }
        self.jobs.append(Job(self.path, spec, self.project, job_id=job_id))
        return self.jobs[-1]

    def reached(self, place: str) -> None:
        wait_for(
            lambda: all((self.gate / f"{place}.reached.{r}").exists() for r in range(2)), f"{place} to be reached", 60
        )


def test_stop_during_startup_or_evaluation_loses_no_step(home: Home) -> None:
    whole = home.job("whole", None)
    assert whole.launch().wait().cause is Cause.COMPLETED

    cut = home.job("cut", None, evaluate_every=8, gate=str(home.gate))
    (home.gate / "build").touch()  # both ranks stay in build()
    attempt = cut.launch()
    home.reached("build")
    attempt.control(desired=Desired.SUSPEND)
    result = attempt.wait()
    assert (result.cause, result.exit_code, result.last_step) == (Cause.API_SUSPEND, EXIT_PREEMPTED, 0), attempt.logs()
    assert cut.checkpoints() == [] and attempt.base() is None

    # Told while both evaluate after step 8: the evaluation is left unfinished, no step is lost.
    (home.gate / "build").unlink()
    (home.gate / "batch").touch()
    attempt = cut.launch()
    home.reached("batch")
    attempt.control(desired=Desired.PREEMPT)
    attempt.wait_freeze(0)
    (home.gate / "batch").unlink()
    result = attempt.wait()
    assert (result.cause, result.last_step) == (Cause.API_PREEMPT, 8), attempt.logs()
    assert cut.checkpoints() == ["step-000000000008.a0002"] and "right" not in attempt.metrics()[8]
    (note,) = attempt.notes()
    assert note.type == "evaluation-abandoned" and "left the evaluation after step 8; it runs again" in note.message

    attempt = cut.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert "right" in attempt.metrics()[8] and "right" in attempt.metrics()[STEPS]
    # The undisturbed run never evaluated: evaluating leaves no trace in buffers, generators or anything else.
    comparison = compare(whole.newest(), cut.newest())
    assert comparison.identical, render(comparison)


def test_third_failed_save_in_a_row_ends_the_attempt(home: Home) -> None:
    job = home.job("blocked", 2)
    blocked = [2, 6, 8, 10]
    for step in blocked:  # a file where the checkpoint's directory would be
        path = job.paths.checkpoint(step, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    attempt = job.launch()
    result = attempt.wait()
    assert (result.cause, result.exit_code) == (Cause.CHECKPOINT_ERROR, EXIT_CHECKPOINT_ERROR), attempt.logs()
    assert {end.last_step for end in result.ranks} == {result.last_step} and result.last_step >= 10  # all at one step
    failed = attempt.messages(kind="checkpoint_failed")
    assert [m.step for m in failed][:4] == blocked and all("not written" in m.error for m in failed)
    assert job.checkpoints() == ["step-000000000001.a0001", "step-000000000004.a0001"]

    # Replicas that are no longer equal are not saved as if they were; the tensor is named.
    attempt = job.launch(spec={"task": {"entrypoint": "mine:Mine", "args": {"steps": STEPS, "diverge_at": 7}}})
    result = attempt.wait()
    assert result.cause is Cause.CHECKPOINT_ERROR and "model/0.bias of rank [1]" in (result.message or "")
    assert job.checkpoints()[-1] == "step-000000000006.a0002"


def test_uneven_step_counts_are_refused_before_the_first_step(home: Home) -> None:
    attempt = home.job("uneven", None, uneven=True).launch()
    result = attempt.wait()
    assert result.cause is Cause.USER_ERROR and f"[{STEPS}, {STEPS + 1}]" in (result.message or ""), attempt.logs()
    assert result.last_step == 0
