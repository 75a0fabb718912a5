"""Scripts that log to a real MLflow server by themselves, killed: one run, each step once.

RATCHET_TEST_LOGGING=N: N jobs with drawn kills (``make own-logging N=100``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.errors import UserError, WorkerError
from ratchet_worker.session import mlflow_run
from tests.support.event_logs import doubles, series
from tests.support.fork_server import LIBRARIES
from tests.support.launch import Job
from tests.support.logging_runs import ROUNDS, draw_kills, run, truth
from tests.support.mlflow_server import histories, mlflow_server
from tests.support.optional_packages import skip_if_missing

pytestmark = [skip_if_missing("mlflow"), pytest.mark.slow]
STEPS = 22


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running.url


@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_mlflow_run_of_a_killed_job_has_each_step_once(jobs: list[Job], tmp_path: Path, server: str) -> None:
    """The control: mlflow's own functions log to the same run, found by MLFLOW_RUN_ID, and repeated steps are second points."""
    total = 0
    for seed in range(ROUNDS):
        kills = draw_kills(seed, STEPS) if ROUNDS > 1 else ["1:8"]
        job = run(
            jobs,
            tmp_path / str(seed),
            ["train.py", "mlflow_run", str(STEPS)],
            kills,
            env={"MLFLOW_TRACKING_URI": server},
        )
        (found,) = histories(server, job.job_id)
        losses = truth(job)
        assert found["loss"] == sorted(losses.items()), kills
        assert found["double"] == [(step, 2 * loss) for step, loss in sorted(losses.items())]
        assert sorted(set(found["plain"])) == found["loss"]
        total += doubles(found["plain"])
        jobs.pop().close()
    print(f"mlflow: {total} doubles of the plain way in {ROUNDS} jobs of {STEPS} steps")
    assert total > 0
    assert histories(server, "") == []  # no run without the job's tag


@pytest.mark.skipif(ROUNDS == 1, reason="make own-logging runs it")
@pytest.mark.timeout(120 + 60 * ROUNDS)
@pytest.mark.parametrize(
    ("framework", "way"),
    [
        ("lightning", "mlflow"), ("accelerate", "mlflow"), ("trainer", "mlflow"), ("accelerate", "mlflow plain"),
        ("trainer", "mlflow plain"),
    ],
)  # fmt: skip
def test_mlflow_of_a_killed_framework_job_has_each_step_once(
    jobs: list[Job], tmp_path: Path, server: str, framework: str, way: str
) -> None:
    """The control: the framework's own logger. (Lightning's begins another run in each attempt.)"""
    total = 0
    for seed in range(ROUNDS):
        kills, home = draw_kills(seed, 24), tmp_path / f"{framework}-{way.replace(' ', '-')}-{seed}"
        env = {"MLFLOW_TRACKING_URI": server, "MLFLOW_EXPERIMENT_NAME": framework}
        job = run(jobs, home, [f"{framework}_board.py", way], kills, interpreters=LIBRARIES, env=env)
        (found,) = histories(server, job.job_id)
        assert len(dict(found["loss"])) == len(set(found["loss"])) == 24, kills
        if (framework, way) == ("accelerate", "mlflow"):
            assert found["without step"] == found["loss"]
        total += doubles(found["loss"])
        jobs.pop().close()
    print(f"{framework}: {total} doubles of {way} in {ROUNDS} jobs of 24 steps")
    assert (total > 0) == (way == "mlflow plain")


@pytest.mark.skipif(ROUNDS == 1, reason="make own-logging runs it")
def test_reference_example_logs_to_tensorboard_and_mlflow(jobs: list[Job], tmp_path: Path, server: str) -> None:
    folder = Path(__file__).parents[4] / "examples" / "reference"
    spec = {"script": ["own_logging.py"], "code": {"path": str(folder)}, "env": {"MLFLOW_TRACKING_URI": server}}
    jobs.append(job := Job(tmp_path, spec, folder, job_id="job-example"))
    job.run_killed(0)
    (found,) = histories(server, job.job_id)
    shown = series(job.paths.work_dir / "tensorboard")[".:loss"]
    assert [step for step, _ in shown] == [step for step, _ in found["loss"]] == [*range(12)]


def test_server_that_is_away_fails_the_attempt_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:hidden@127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said = "^MLFLOW_TRACKING_URI=http://...@127.0.0.1:1: the job's run was neither found nor created .*set MLFLOW_RUN_ID in `env`"
    if ROUNDS == 1:  # with more, the server's refusal is waited for
        monkeypatch.setattr(mlflow_run, "_DEADLINE", 0.1)
    with pytest.raises(UserError, match=said) as ended:  # ends the job
        mlflow_run.find_in_new_process("job-1", 1)
    assert "hidden" not in str(ended.value)
    with pytest.raises(WorkerError, match=said) as found:  # the job's next attempt may find it
        mlflow_run.find_in_new_process("job-1", 2)
    assert not isinstance(found.value, UserError)
