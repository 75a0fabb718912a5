"""A PowerSGD job that is suspended and goes on with one rank instead of two, as a user would do it: the command line tells what
is missing, the report what became of each part, and the training goes on from where it was."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.support import gated_task
from tests.support.cli import Cli
from tests.support.launch import wait_freeze
from tests.support.server import Server

TOTAL = 66  # 3 epochs of 1437 images in batches of 2 x 32
SPEC: dict[str, Any] = {
    "name": "digits-resized",
    "world": {"ranks_per_node": 2, "device": "cpu"},
    "resources": {"cpus_per_rank": 1},
    "hook": {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 5},
    "checkpoint": {"every_steps": 20},
}


def events(server: Server, job: str) -> list[dict[str, Any]]:
    return list(server.call("GET", f"/v1/jobs/{job}/events?limit=100").json()["items"])


@pytest.mark.slow
def test_suspended_job_resumes_on_another_number_of_ranks(server: Server, tmp_path: Path) -> None:
    gate, cli = tmp_path / "gates" / "31", Cli(server.home, tmp_path)
    gate.parent.mkdir()
    gate.touch()
    (tmp_path / "code").mkdir()
    gated_task.write_task(tmp_path / "code")
    arguments = {"gates": str(gate.parent), "epochs": 3, "width": 16, "evaluate": False}
    task = {"entrypoint": gated_task.ENTRYPOINT, "args": arguments}
    job = server.submit({**SPEC, "task": task, "code": {"path": str(tmp_path / "code")}})
    _, paths = server.wait_step(job, 30, saved=True)
    early = server.call("POST", f"/v1/jobs/{job}/resume", json={"world": {"ranks_per_node": 1}}, expect=409)
    assert early.json()["code"] == "world-needs-stop"
    server.call("POST", f"/v1/jobs/{job}/suspend")
    wait_freeze(paths, 0)
    gate.unlink()
    at = server.wait_phase(job, "SUSPENDED")["progress"]["step"]
    assert at == 31
    refused = cli("resume", job, "--world", "1", expect=4).errors
    assert "on_hook_mismatch to redistribute" in refused and "powerSGD" in refused
    shown = server.call("GET", f"/v1/jobs/{job}/hook").json()
    assert (shown["source"], shown["step"], list(shown["residual_norm"])) == ("checkpoint", at, ["0", "1"])
    refused = cli("resume", job, "--set", "task.args.lr=1", expect=2).errors
    assert "only the hook can be changed here" in refused
    change = ("--set", "hook.matrix_approximation_rank=3", "--on-hook-mismatch", "redistribute")
    resumed = cli("resume", job, "--world", "1", *change, "--json").data
    assert resumed["spec"]["world"]["ranks_per_node"] == 1
    assert resumed["spec"]["hook"]["matrix_approximation_rank"] == 3
    ended = server.wait_phase(job, "SUCCEEDED")
    assert (
        ended["progress"]["step"] == ended["progress"]["total_steps"] == TOTAL
    )  # one rank alone would take 132 for 3 epochs

    first, second = server.attempts(job)
    assert (first["cause"], first["steps_lost"], second["base"]["step"]) == ("api-suspend", 0, at)
    report = second["resume_report"]
    assert (report["verdict"], report["recorded_world_size"], report["world_size"]) == ("not-exact", 2, 1)
    assert {c["component"]: c["status"] for c in report["components"]} == {
        "model": "exact", "optimizer": "exact", "layout": "exact", "hook": "redistributed", "data": "redistributed",
        "buffers": "redistributed", "scheduler": "redistributed", "rng": "reset",
    }  # fmt: skip
    differences = {d["key"]: (d["recorded"], d["current"]) for d in report["differences"]}
    assert differences.keys() == {"ranks_per_node", "world_size", "spec:hook.matrix_approximation_rank"}
    assert differences["ranks_per_node"] == differences["world_size"] == (2, 1)
    assert differences["spec:hook.matrix_approximation_rank"] == (2, 3)
    why = next(c["reason"] for c in report["components"] if c["component"] == "hook")
    assert (
        "mean of the old residuals" in why
        and "hook.matrix_approximation_rank 2 -> 3" in why
        and "reset: P and Q" in why
    )
    why = next(c["reason"] for c in report["components"] if c["component"] == "data")
    assert "the global batch was 64 and is 32" in why
    assert {"hook-changed", "world-changed", "policy-changed"} <= {e["type"] for e in events(server, job)}
    assert [note for note in report["notes"] if str(TOTAL) in note and "132" in note]

    series = server.call("GET", f"/v1/jobs/{job}/metrics?name=loss").json()["series"][0]["points"]
    begin = mean(p["value"] for p in series[:10])
    goes_on = [p["value"] for p in series if p["attempt"] == 2][:10]
    assert [p["step"] for p in series] == list(range(1, TOTAL + 1))
    assert mean(goes_on) < 0.9 * begin
    hook = server.call("GET", f"/v1/jobs/{job}/hook").json()
    assert (list(hook["residual_norm"]), hook["iteration"], hook["source"]) == (["0"], TOTAL, "checkpoint")
    for checkpoint in server.call("GET", f"/v1/jobs/{job}/checkpoints").json()["items"]:
        url = f"/v1/jobs/{job}/checkpoints/{checkpoint['id']}/verify"
        assert server.call("POST", url).json()["verification"] == "ok"
