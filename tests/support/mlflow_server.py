"""A real ``mlflow server`` on a free port, with a database file; it ends with the block."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support.server import wait_for


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Yield its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    quiet = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: server.poll() is not None or _answers(url), f"mlflow server\n{(folder / 'server.log')}", 120)
        assert server.poll() is None, (folder / "server.log").read_text()
        yield url
    finally:
        if server.poll() is None:
            os.killpg(server.pid, 9)
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def histories(url: str, job_id: str) -> list[dict[str, list[tuple[int, float]]]]:
    """For each run with the job's tag, oldest first, or each without it if ``job_id`` is empty: by key, (step, value) of
    every point, read from the REST interface, which needs no import of mlflow."""
    import json

    def post(path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"{url}/api/2.0/mlflow/{path}", timeout=20) as answer:
            return json.load(answer)

    experiments = post("experiments/search", {"max_results": 100})["experiments"]
    body = {"experiment_ids": [one["experiment_id"] for one in experiments], "order_by": ["attributes.start_time ASC"]}
    found = []
    for run in post("runs/search", body).get("runs", []):
        tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
        if tags.get("ratchet.job_id", "") != job_id:
            continue
        run_id, points = run["info"]["run_id"], {}
        for key in sorted({metric["key"] for metric in run["data"].get("metrics", [])}):
            history = get(f"metrics/get-history?run_id={run_id}&metric_key={quote(key)}")["metrics"]
            points[key] = sorted((int(point["step"]), float(point["value"])) for point in history)
        found.append(points)
    return found
