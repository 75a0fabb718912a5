"""Ordinary scripts with Lightning as jobs, killed once: under Lightning's own DDP, by LightningCLI, with each kind of logger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_store.read.compare import compare, render
from tests.support.full_matrix import full
from tests.support.launch import Attempt, Job
from tests.support.lightning_jobs import CODE, LightningJob
from tests.support.optional_packages import skip_if_missing

pytestmark = skip_if_missing("lightning")
AGENTS = "libraries"
SPEC: dict[str, Any] = {"checkpoint": {"every_steps": 5, "first": "off"}}
STEPS = 32


def killed_once(jobs: list[Job], home: Path, *script: str, **spec: Any) -> list[Attempt]:
    jobs.append(job := LightningJob(home, {}, "killed", script=[*script], code={"path": str(CODE)}, **SPEC | spec))
    first, second = job.run(), job.run()
    assert [one.wait().cause for one in (first, second)] == [Cause.RANK_KILLED, Cause.COMPLETED], second.logs()
    return [first, second]


def test_unmanaged_lightning_ddp_job_is_restarted_and_resumes_by_script(jobs: list[Job], tmp_path: Path) -> None:
    first, second = killed_once(jobs, tmp_path, "by_ddp.py")
    assert [one.report().verdict for one in (first, second)] == ["unmanaged"] * 2
    assert f"began at last ended at {STEPS}" in second.paths.log(0).read_text()
    assert jobs[0].checkpoints() == []


def assert_exact(jobs: list[Job], home: Path, *script: str) -> dict[int, dict[str, float]]:
    """The job's metrics."""
    attempts = killed_once(jobs, home, *script)
    assert attempts[1].report().verdict == "exact" and attempts[1].report().base.step in (15, 20)
    jobs.append(whole := LightningJob(home, {}, "whole", script=[*script], code={"path": str(CODE)}, **SPEC))
    whole.attempts.append(undisturbed := Attempt(whole, 2, {}))  # which no rank of is killed
    assert undisturbed.wait(120).cause is Cause.COMPLETED, undisturbed.logs()
    comparison = compare(whole.newest(), jobs[0].newest())
    assert comparison.identical, render(comparison)
    logged = {step: values for one in attempts for step, values in one.metrics().items()}
    assert logged == undisturbed.metrics()
    return logged


@pytest.mark.parametrize(
    "logger",
    [pytest.param("none", marks=full), "csv", pytest.param("board", marks=[full, skip_if_missing("tensorboard")])],
)
def test_values_logged_by_a_lightning_module_are_job_metrics(jobs: list[Job], tmp_path: Path, logger: str) -> None:
    logged = assert_exact(jobs, tmp_path, "by_session.py", logger)
    assert [step for step, values in logged.items() if "loss" in values] == [*range(2, STEPS + 1, 2)]
    assert [step for step, values in logged.items() if "accuracy" in values] == [8, 16, 24, 32]
    assert f"fit ended with {logged[STEPS]['accuracy']}\n" in jobs[0].attempts[1].paths.log(0).read_text()
    work = jobs[0].paths.work_dir
    assert sorted(path.name for path in work.glob("logs/*/*")) == ([] if logger == "none" else ["version_0"])
    if logger == "board":
        assert len(list(work.glob("logs/lightning_logs/version_0/events.*"))) > 1  # of both attempts


@skip_if_missing("jsonargparse")
def test_killed_lightning_cli_resumes_exactly(jobs: list[Job], tmp_path: Path) -> None:
    strategy = ("--trainer.strategy", "ratchet")
    assert_exact(jobs, tmp_path, "by_cli.py", "fit", "--config", str(CODE / "cli.yaml"), *strategy)


def undisturbed(jobs: list[Job], home: Path, what: str) -> Attempt:
    jobs.append(job := LightningJob(home, {}, "job", script=["by_session.py", what], code={"path": str(CODE)}, **SPEC))
    job.attempts.append(attempt := Attempt(job, 2, {}))  # which no rank of is killed
    attempt.wait(120)
    return attempt


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ("fit", "call trainer.fit only once per job"),
        ("tune", "callbacks=[LearningRateFinder()]"),
        ("ckpt_path", "ckpt_path: the job resumes from its own checkpoints"),
        ("set ckpt_path", "ckpt_path: the job resumes from its own checkpoints"),
    ],
)
def test_unsupported_fit_is_refused_with_advice(jobs: list[Job], tmp_path: Path, what: str, advice: str) -> None:
    result = (attempt := undisturbed(jobs, tmp_path, what)).wait()
    assert result.cause is Cause.USER_ERROR and advice in str(result.message), attempt.logs()


def test_checkpoint_that_an_exception_left_is_not_refused(jobs: list[Job], tmp_path: Path) -> None:
    attempt = undisturbed(jobs, tmp_path, "own ckpt_path")
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert "checkpoint path at" in attempt.logs() and "on_exception.ckpt" in attempt.logs()
