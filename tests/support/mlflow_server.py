"""A real MLflow server on a free port, with a database file."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support.fork_server import MLFLOW, Program
from tests.support.server import wait_for


class MlflowServer:
    """What ``mlflow server`` starts, with the variables that it sets, on ``folder``. It has one port for all its starts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: Program | subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Return when it answers, its database made."""
        store = f"sqlite:///{self._folder / 'mlflow.db'}"
        variables = {
            "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "_MLFLOW_SGI_NAME": "uvicorn",
            "_MLFLOW_SERVER_FILE_STORE": store, "_MLFLOW_SERVER_REGISTRY_STORE": store,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": str(self._folder / "artifacts"),
        }  # fmt: skip
        command = [sys.executable, "-m", "uvicorn", "--host", "127.0.0.1", "--port", str(self._port)]
        with (self._folder / "server.log").open("ab") as log:
            self._process = MLFLOW.start(
                [*command, "mlflow.server.fastapi_app:app"], log.fileno(), env=os.environ | variables, cwd=self._folder
            )
        wait_for(self._answers, "the MLflow server", 120)
        _call(self.url, "experiments/search", {"max_results": 1})  # makes the database

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):  # a test's own end kills all that names its directory
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """It runs, and ends with the block."""
    server = MlflowServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _call(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer to a GET, or to a POST of ``body``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def histories(url: str, job_id: str) -> list[dict[str, list[tuple[int, float]]]]:
    """For each run with the job's tag, oldest first, or each without it if ``job_id`` is empty: by key, (step, value) of
    every point, read from the REST interface, which needs no import of mlflow."""
    experiments = _call(url, "experiments/search", {"max_results": 100})["experiments"]
    body = {"experiment_ids": [one["experiment_id"] for one in experiments], "order_by": ["attributes.start_time ASC"]}
    found = []
    for run in _call(url, "runs/search", body).get("runs", []):
        tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
        if tags.get("ratchet.job_id", "") != job_id:
            continue
        run_id, points = run["info"]["run_id"], {}
        for key in sorted({metric["key"] for metric in run["data"].get("metrics", [])}):
            history = _call(url, f"metrics/get-history?run_id={run_id}&metric_key={quote(key)}")["metrics"]
            points[key] = sorted((int(point["step"]), float(point["value"])) for point in history)
        found.append(points)
    return found
