"""Scripts that log to TensorBoard and MLflow by themselves, killed: each step once, with the value of an undisturbed run.

RATCHET_TEST_LOGGING=N: N jobs of each kind with drawn kills (``make own-logging N=100``).
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from pathlib import Path

import pytest

from ratchet import Session
from ratchet_contract.errors import UserError
from tests.support.event_logs import Points, doubles, series
from tests.support.fork_server import RANKS
from tests.support.launch import Job
from tests.support.logging_runs import CODE, ROUNDS, draw_kills, run, truth
from tests.support.optional_packages import skip_if_missing

board = skip_if_missing("tensorboard")
STEPS = 22


def points(losses: dict[int, float], factor: float = 1.0) -> Points:
    """As TensorBoard has them: float32."""
    return [(step, struct.unpack("f", struct.pack("f", factor * loss))[0]) for step, loss in sorted(losses.items())]


@board
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_summary_writer_of_a_killed_job_shows_each_step_once(jobs: list[Job], tmp_path: Path, seed: int) -> None:
    kills = draw_kills(seed, STEPS)
    job = run(jobs, tmp_path / "killed", ["train.py", "summary_writer", str(STEPS)], kills, ranks=2 if seed == 0 else 1)
    whole = run(jobs, tmp_path / "whole", ["train.py", "summary_writer", str(STEPS)], [], ranks=2 if seed == 0 else 1)
    found, undisturbed = (series(one.paths.work_dir / "tensorboard") for one in (job, whole))
    assert found == undisturbed, kills
    losses = truth(whole)
    assert [*losses] == [*range(STEPS)] and truth(job) == losses
    assert found[".:loss"] == points(losses)
    assert found["both_double:both"] == points(losses, 2)  # of add_scalars
    assert [step for step, _ in found[".:of epoch"]] == [0, 1, 2, 3, 4]


@board
@pytest.mark.parametrize("kind", ["purge_step", "plain"])
def test_plain_summary_writer_needs_a_purge_step(jobs: list[Job], tmp_path: Path, kind: str) -> None:
    """The control: without it, TensorBoard shows the repeated steps twice."""
    total = 0
    for seed in range(ROUNDS):
        job = run(jobs, tmp_path / f"killed-{seed}", ["train.py", kind, str(STEPS)], kills := draw_kills(seed, STEPS))
        shown = series(job.paths.work_dir / "tensorboard")[".:loss"]
        assert sorted(set(shown)) == points(truth(job)), kills
        total += doubles(shown)
        jobs.pop().close()
    print(f"{kind}: {total} doubles in {ROUNDS} jobs of {STEPS} steps")
    assert (total > 0) == (kind == "plain")


def test_without_tensorboard_the_error_names_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delitem(sys.modules, "ratchet_worker.session.summary_writer", raising=False)
    with (
        Session(tmp_path) as session,
        pytest.raises(UserError, match=r"needs tensorboard in .*: pip install tensorboard"),
    ):
        session.summary_writer()


@board
def test_summary_writer_refuses_a_directory_that_is_not_local(tmp_path: Path) -> None:
    with Session(tmp_path) as session, pytest.raises(UserError, match="s3://bucket/logs is not a local directory"):
        session.summary_writer("s3://bucket/logs")


@board
def test_summary_writer_works_without_a_service(tmp_path: Path) -> None:
    command = [sys.executable, str(CODE / "train.py"), "summary_writer", str(STEPS), "1:8", "2:13"]
    for attempt, code in enumerate((-signal.SIGKILL, -signal.SIGKILL, 0), 1):
        done = RANKS.run(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "TRY": str(attempt)})
        assert done.returncode == code, done.stderr
    shown = series(tmp_path / "ratchet-checkpoints" / "tensorboard")
    lines = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()]
    losses = {step: loss for _, step, loss in lines}
    assert len(lines) > STEPS and shown[".:loss"] == points(losses)
    # of a second writer, and of one in a directory within the first one's, both opened after the first save
    assert shown[".:again"] == points({step: loss for step, loss in losses.items() if step % 4 == 3})
    assert shown["val:val"] == points({step: loss for step, loss in losses.items() if step >= 7})
