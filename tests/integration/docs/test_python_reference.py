"""The examples of ``docs/python.md`` run: a Session and a Task as jobs of one rank, the loader alone, the client beside them."""

from __future__ import annotations

import os
import sys
from typing import Any

import yaml

from tests.support.docs import ROOT
from tests.support.fork_server import RANKS
from tests.support.server import Server

VARIABLES = {"TEST_STEP_SECONDS": "0.02"}  # what is called beside a training has the cores
REFERENCE = ROOT / "examples" / "reference"


def spec(name: str) -> dict[str, Any]:
    return {**yaml.safe_load((REFERENCE / name).read_text()), "code": {"path": str(REFERENCE)}}


def test_python_reference_examples_all_run(server: Server) -> None:
    trained = {server.submit(spec(name)): name for name in ("train.yaml", "epochs.yaml", "classifier.yaml")}
    variables = {**os.environ, "RATCHET_HOME": str(server.home), "RATCHET_CONFIG": str(server.home / "none.json")}
    for script in ("loader.py", "client.py"):
        command = [sys.executable, str(REFERENCE / script)]
        done = RANKS.run(command, env=variables, timeout=240)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for job_id, name in trained.items():
        server.wait_phase(job_id, "SUCCEEDED")
        series = {
            one["name"]: one["points"] for one in server.call("GET", f"/v1/jobs/{job_id}/metrics").json()["series"]
        }
        metric = "test_accuracy" if name == "classifier.yaml" else "accuracy"
        assert [point["step"] for point in series[metric]][-1] == 40, f"{name}: {sorted(series)}"
        assert len(series["loss"]) == 40
