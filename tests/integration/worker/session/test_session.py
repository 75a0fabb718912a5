"""A user's script with its own loop and a Session, beside modules named like parts of Ratchet: exact under the same stops."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from ratchet_contract.exit_codes import EXIT_PREEMPTED
from ratchet_contract.phases import Cause, Desired
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.compare import compare, render
from tests.support.launch import Attempt, Job
from tests.support.server import wait_for
from tests.support.user_projects import make_project

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
        "determinism": "strict",
    }
    return Job(tmp_path, spec, project, job_id=job_id)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[tuple[Job, Job]]:
    gate = tmp_path / "gate"
    gate.mkdir()
    held = "--hold", "12", "--hold-evaluation", "24", "--hold-end", "--gate", str(gate)
    both = _job(tmp_path, "whole", "--end", "bottom"), _job(tmp_path, "cut", "--end", "top", *held)
    yield both
    for job in both:
        job.close()


def _held(attempt: Attempt, gate: Path, place: object, ranks: tuple[int, ...] = (0, 1)) -> None:
    held = [gate / f"held{place}.{r}" for r in ranks]
    wait_for(lambda: all(p.exists() for p in held), f"{place}\n{attempt.logs()}", 60)


def _wish_while_held(attempt: Attempt, gate: Path, place: object, round_: int, **wish: Any) -> None:
    _held(attempt, gate, place)
    attempt.control(**wish)
    attempt.wait_freeze(round_)
    (gate / f"go{place}").touch()


def _port(attempt: Attempt) -> int:
    env = Path(f"/proc/{attempt.pid(0)}/environ").read_bytes().split(b"\0")
    return next(int(pair.split(b"=")[1]) for pair in env if pair.startswith(b"MASTER_PORT="))


def test_session_suspended_after_requested_save_resumes_exactly(jobs: tuple[Job, Job], tmp_path: Path) -> None:
    whole, cut = jobs
    attempt = whole.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert "after the loop" in attempt.paths.log(0).read_text()

    # Held in the body of a step and in an evaluation at the end of one, until both ranks are in the freeze: what is agreed on
    # there is acted on behind them, and what the script makes of the evaluation belongs to the step.
    attempt = cut.launch()
    _wish_while_held(attempt, tmp_path / "gate", 12, 0, checkpoint_request=1)
    _wish_while_held(attempt, tmp_path / "gate", "evaluation", 1, checkpoint_request=1, desired=Desired.SUSPEND)
    result = attempt.wait()
    assert (result.cause, result.exit_code, result.last_step) == (Cause.API_SUSPEND, EXIT_PREEMPTED, 24), attempt.logs()
    saves = [(m.step, m.reason) for m in attempt.messages(kind="checkpoint")]
    assert saves == [(1, "first"), (10, "schedule"), (13, "request"), (20, "schedule"), (24, "stop")]

    # A stop that only one rank hears of while the other has come to its end: all come to their end.
    attempt = cut.launch()
    _held(attempt, tmp_path / "gate", "end", (1,))
    store = TCPStore("127.0.0.1", _port(attempt), is_master=False)
    wait_for(lambda: store.check(["exchange/finish/0"]), f"rank 0 to come to its end\n{attempt.logs()}", 30)
    attempt.kill(1, signal.SIGTERM)
    attempt.wait_freeze(0)
    (tmp_path / "gate" / "goend").touch()
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
    # Either left its loop by a break, in the step that a scheduled checkpoint was due in and in the one behind it.
    for job in jobs:
        assert job.newest().name.startswith(f"step-{STEPS:012d}") and read_manifest(job.newest()).finished
        assert [(m.step, m.finished) for m in job.attempts[-1].messages(kind="checkpoint")][-1] == (STEPS, True)
    assert whole.attempts[0].metrics()[24]["right"] == {**cut.attempts[0].metrics(), **attempt.metrics()}[24]["right"]
