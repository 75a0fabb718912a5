"""The one run that a job has in MLflow, over all attempts.

``python -m ratchet_worker.session.mlflow_run JOB`` finds or creates it and prints its id. A rank calls this before the script
starts, in a process of its own: an import of mlflow in the rank starts threads, and would be before the script's settings.
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ratchet_contract import env_vars as names
from ratchet_contract.errors import UserError, WorkerError
from ratchet_contract.phases import NoteType

if TYPE_CHECKING:
    from mlflow.entities import Metric

    from ratchet_worker.training.runtime import Runtime

TAG: Final = "ratchet.job_id"
_DEADLINE: Final = 60.0
_REQUESTS: Final = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Seconds and number of retries of a request to the server, unless the job sets them: else mlflow retries for many minutes."""
_USER_AND_PASSWORD: Final = re.compile(r"//[^/\s]+@")
_CURE: Final = (
    "start the server or correct MLFLOW_TRACKING_URI, then `ratchet resume {job}`. To name a run yourself set MLFLOW_RUN_ID in "
    "`env` of the spec; to log without MLflow leave MLFLOW_TRACKING_URI out"
)


def find_in_new_process(job_id: str, attempt: int) -> str:
    """Return the id of the job's run, found or created by another process with this interpreter. If the server does not answer,
    raises ``UserError`` in the job's first attempt, which ends the job; later ``WorkerError``, after which it is tried again."""
    command = [sys.executable, "-P", "-m", __name__, job_id]
    try:
        done = subprocess.run(
            command, env={**_REQUESTS, **os.environ}, capture_output=True, text=True, timeout=_DEADLINE
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _unreachable(job_id, attempt, f"no answer within {_DEADLINE:.0f} s") from None
    if done.returncode:
        raise _unreachable(job_id, attempt, " ".join(done.stderr.strip().splitlines()[-1:]))
    return done.stdout.split()[-1]


def _unreachable(job_id: str, attempt: int, why: str) -> WorkerError:
    kind = UserError if attempt == 1 else WorkerError
    text = (
        f"MLFLOW_TRACKING_URI={os.environ.get(names.MLFLOW_TRACKING_URI, '')}: the job's run was neither found nor created "
        f"({why[:1000]}). Without its id, each attempt would be another run in MLflow: {_CURE.format(job=job_id)}"
    )
    return kind(_USER_AND_PASSWORD.sub("//...@", text), code="mlflow-unreachable")


def find_or_create(client: Any, job_id: str) -> str:
    """Return the id of the run with the job's tag, the oldest if there are several; without one, create it in the experiment of
    MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME, which is created too. Raises mlflow's errors."""
    experiment = _experiment(client)
    found = client.search_runs(
        [experiment], f"tags.`{TAG}` = '{job_id}'", order_by=["attributes.start_time ASC"], max_results=1
    )
    if found:
        return str(found[0].info.run_id)
    return str(client.create_run(experiment, tags={TAG: job_id}, run_name=job_id).info.run_id)


def _experiment(client: Any) -> str:
    """Return the id of the experiment that mlflow's own functions would use."""
    if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return given
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
    found = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if found is None else found.experiment_id)


class MlflowRun:
    """A job's run in MLflow. ``run_id``: its id; ``client``: mlflow's ``MlflowClient`` for everything that is no metric, such as
    ``client.log_artifact(run.run_id, path)``. Both are None on ranks other than 0."""

    def __init__(self, runtime: Runtime, run_id: str | None = None) -> None:
        self.run_id: str | None = None
        self.client: Any = None
        self._runtime = runtime
        self._logged: dict[str, set[int]] = {}  # by key, the steps that the run had at the start of this attempt
        self._noted = False
        if runtime.rank != 0:
            return
        try:
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise UserError(
                f"session.mlflow_run needs mlflow in {sys.executable}: pip install mlflow ({error})",
                code="mlflow-missing",
            ) from error
        self.client = MlflowClient()
        launch = runtime.launch
        try:
            self.run_id = run_id or os.environ.get(names.MLFLOW_RUN_ID) or find_or_create(self.client, launch.job_id)
            self._keys = set(self.client.get_run(self.run_id).data.metrics)
            self.client.update_run(self.run_id, status="RUNNING")
        except MlflowException as error:
            raise _unreachable(launch.job_id, launch.attempt, str(error)) from error
        atexit.register(self._end)

    def log_metric(self, key: str, value: float, step: int) -> None:
        """Log one metric, and wait until the server has it. A step that an earlier attempt has logged is skipped. Raises mlflow's
        errors."""
        self.log_metrics({key: value}, step)

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics by key, as ``log_metric`` does, in one request."""
        if self.client is None:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.log_points([Metric(key, float(value), now, step) for key, value in values.items()])

    def log_points(self, points: Sequence[Metric]) -> None:
        """Log mlflow's ``Metric`` objects on rank 0, as ``log_metrics`` does."""
        new = [point for point in points if point.step not in self._steps(point.key)]
        if len(new) < len(points):
            self._note_if_not_exact()
        if new:
            # A save of this step, and a kill after it, must find the values on the server.
            self.client.log_batch(self.run_id, metrics=new, synchronous=True)

    def _steps(self, key: str) -> set[int]:
        """Return the steps of ``key`` that the run had when this attempt first logged it."""
        if key not in self._logged:
            history = self.client.get_metric_history(self.run_id, key) if key in self._keys else []
            self._logged[key] = {point.step for point in history}
        return self._logged[key]

    def _note_if_not_exact(self) -> None:
        """Report, once, that skipped values may differ from those that this attempt computes."""
        if self._noted or not self._runtime.is_not_exact:
            return
        self._noted = True
        self._runtime.reporter.note(
            NoteType.MLFLOW_VALUES_KEPT,
            f"MLflow run {self.run_id}: the resume was not exact, and the values that earlier attempts have logged for repeated "
            "steps are kept; those of this attempt may differ, and are skipped",
        )

    def _end(self) -> None:
        """At the interpreter's exit, mark the run as finished if the job is."""
        if self._runtime.finished:
            self.client.set_terminated(self.run_id, "FINISHED")


class RunClient:
    """An ``MlflowClient`` whose ``log_batch`` skips points that the run has already. For loggers of other packages."""

    def __init__(self, run: MlflowRun) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.client, name)

    def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), **others: Any) -> None:
        """Log as mlflow's ``log_batch`` does, but wait for the server. Raises mlflow's errors."""
        self._run.log_points(metrics)
        if others.keys() - {"synchronous"}:
            self._run.client.log_batch(run_id, **{**others, "synchronous": True})


class RunModule:
    """The module mlflow, whose ``log_metrics`` skips steps that the active run has already. ``make_run``: returns the job's run
    by its id. For loggers of other packages."""

    def __init__(self, mlflow: Any, make_run: Callable[[str], MlflowRun]) -> None:
        self._mlflow, self._make_run = mlflow, make_run
        self._run: MlflowRun | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mlflow, name)

    def log_metrics(self, metrics: Mapping[str, float], step: int, **_: Any) -> None:
        """Log as mlflow's ``log_metrics`` does, but wait for the server. Raises mlflow's errors."""
        self._run = self._run or self._make_run(self._mlflow.active_run().info.run_id)
        self._run.log_metrics(metrics, step)


def main() -> None:
    """Print the id of the run of the job that the command line names."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        print(find_or_create(MlflowClient(), sys.argv[1]))
    except MlflowException as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
