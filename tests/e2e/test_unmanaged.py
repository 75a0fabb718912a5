"""A script that torchrun would run, unchanged: started, started again after a kill, stopped, and told of as what it is."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet_contract.paths import AttemptPaths
from tests.support.cli import Cli
from tests.support.server import Server, rank_pid, wait_for

# As in torch's own tutorials: the launcher's variables, a group by env://, a checkpoint of its own in the current directory.
TRAIN = """
import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from helper import net

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--hold", type=int, help="stay from this step on while the file `hold` is there")
parser.add_argument("--handler", action="store_true")
args = parser.parse_args()

stop = []


def on_term(number, frame):
    stop.append(number)
    print(f"handler {os.environ['RANK']}", flush=True)
    if Path("impatient").exists():
        sys.exit(3)


if args.handler:
    signal.signal(signal.SIGTERM, on_term)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
half = dist.new_group([0])
torch.manual_seed(0)
model = DDP(net(float(Path("data/start.txt").read_text())))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
path = Path("out/checkpoint.pt")
first = 0
if path.exists():
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    first = saved["step"]
print(f"from step {first}, restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
for step in range(first, args.steps):
    loss = model(torch.ones(2, 4) * (rank + 1)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        path.parent.mkdir(exist_ok=True)
        torch.save({"model": model.state_dict(), "step": step + 1}, "out/new.pt")
        os.replace("out/new.pt", path)
    while args.hold and args.hold <= step + 1 and Path("hold").exists() and not stop:
        Path(f"held.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{rank}").touch()
        time.sleep(0.01)
    told = torch.tensor(float(bool(stop)))
    dist.all_reduce(told)
    if told:
        break
else:
    time.sleep(0.3 * rank)    # ranks come to their end at different times
    if rank == 0:
        torch.save({"model": model.state_dict(), "step": step + 1}, "final.pt")
if args.handler:
    dist.destroy_process_group()
"""
HELPER = """
import torch


def net(value):
    made = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(made.weight, value)
    return made
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    (root / "data").mkdir()
    (root / "data" / "start.txt").write_text("0.25")
    (root / "train.py").write_text(TRAIN)
    (root / "helper.py").write_text(HELPER)
    (root / "hold").touch()
    return root


def submit(server: Server, project: Path, *arguments: str, **more: Any) -> str:
    spec = {
        "name": "unchanged",
        "script": ["train.py", *arguments],
        "code": {"path": str(project)},
        "world": {"ranks_per_node": 2, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "policy": {"backoff": 0.05, "stop_grace": 20},
        **more,
    }
    return server.submit(spec)


def held(server: Server, job_id: str, attempt: int) -> AttemptPaths:
    """Both ranks of that attempt stay at the step they were asked to."""
    work, paths = server.paths.job(job_id).work_dir, server.paths.job(job_id).attempt(attempt)
    files = [work / f"held.{attempt - 1}.{rank}" for rank in range(2)]
    try:
        wait_for(lambda: all(f.exists() for f in files), "both ranks to be held", 60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{server.job(job_id)}\n{server.rank_logs(job_id)}") from None
    return paths


def test_unmanaged_script_is_restarted_and_resumes_from_own_checkpoint(
    server: Server, project: Path, tmp_path: Path
) -> None:
    job_id = submit(server, project, "--steps", "8", "--hold", "3")
    work = server.paths.job(job_id).work_dir
    held(server, job_id, 1)
    job = server.wait_phase(job_id, "RUNNING")
    assert "unmanaged-script" in [w["code"] for w in job["warnings"]] and job["work_dir"] == str(work)
    assert not (work / "train.py").stat().st_mode & stat.S_IXUSR and os.access(work / "data", os.W_OK)
    (snapshot,) = [p for p in server.paths.code.iterdir() if p.is_dir()]
    names = {p.name for p in snapshot.iterdir()} - {"__pycache__"}  # root's Python may write where nobody else may
    assert sorted(names) == ["data", "helper.py", "hold", "train.py"]

    server.call("POST", f"/v1/jobs/{job_id}/preempt")
    paths = held(server, job_id, 2)
    os.kill(rank_pid(paths, 1), signal.SIGKILL)
    paths = held(server, job_id, 3)
    (work / "hold").unlink()
    done = server.wait_phase(job_id, "SUCCEEDED")

    first, second, third = server.attempts(job_id)
    assert [a["cause"] for a in (first, second, third)] == ["api-preempt", "rank-killed", "completed"]
    assert (done["budgets"]["preemptions"], done["budgets"]["failures"]) == (1, 1)
    assert done["budgets"]["attempts_without_progress"] == 0
    for attempt in (first, second, third):
        report = attempt["resume_report"]
        assert (report["verdict"], report["components"], attempt["base"]) == ("unmanaged", [], None)
        assert attempt["training_at"] is not None
    assert "hang is not detected" in " ".join(report["notes"])
    assert not paths.base_file.exists()
    starts = [server.paths.job(job_id).attempt(n).log(1).read_text().splitlines()[0] for n in (1, 2, 3)]
    assert starts == ["from step 0, restart 0", "from step 3, restart 1", "from step 4, restart 2"]
    final = torch.load(work / "final.pt")
    assert final["step"] == 8

    cli = Cli(server.home, tmp_path)
    shown = [cli(command, job_id) for command in ("wait", "get", "attempts", "events")]
    told = " ".join(part.text + part.errors for part in shown)
    assert "step 0" not in told and "steps not reported" in told and "killed by SIGKILL" in told, told

    files = server.call("GET", f"/v1/jobs/{job_id}/files").json()["items"]
    assert "final.pt" in [item["path"] for item in files] and "train.py" not in [item["path"] for item in files]
    deleted = server.call("DELETE", f"/v1/jobs/{job_id}").json()
    assert deleted["outputs"] == str(work) and (work / "final.pt").is_file() and not (work / "train.py").exists()
    server.call("DELETE", f"/v1/jobs/{job_id}?outputs=true")
    assert not server.paths.job(job_id).root.exists()


def test_stop_of_unmanaged_script_calls_its_sigterm_handler(server: Server, project: Path, tmp_path: Path) -> None:
    job_id = submit(server, project, "--hold", "2", "--handler", checkpoint={"every_steps": 10})
    work = server.paths.job(job_id).work_dir
    held(server, job_id, 1)
    cli = Cli(server.home, tmp_path)
    refused = cli("checkpoint", job_id, expect=4)
    assert "train.py has made no Session of Ratchet: Ratchet cannot save" in refused.errors
    answer = server.call("POST", f"/v1/jobs/{job_id}/checkpoint", expect=409)
    assert answer.json()["code"] == "checkpoint-needs-session"
    for command in (("checkpoints", "ls"), ("hook",), ("metrics",)):
        told = cli(*command, job_id)
        assert "train.py has no Session of Ratchet" in told.text + told.errors and "ratchet checkpoint" not in told.text
    server.call("POST", f"/v1/jobs/{job_id}/suspend")
    job = server.wait_phase(job_id, "SUSPENDED")
    assert {w["code"] for w in job["warnings"]} >= {"unmanaged-script", "checkpoint-needs-session"}
    (attempt,) = server.attempts(job_id)
    assert (attempt["cause"], attempt["outcome"]) == ("api-suspend", "suspended"), attempt
    assert "ended by itself" in attempt["message"]
    for rank in range(2):
        assert f"handler {rank}" in server.paths.job(job_id).attempt(1).log(rank).read_text()

    for options in (
        ("--hook", "powerSGD"),
        ("--set", "hook.name=powerSGD"),
        ("--hook", "powerSGD", "--code", str(project)),
    ):
        refused = cli("resume", job_id, *options, expect=5)
        assert "hook powerSGD would not be applied: train.py has no Session of Ratchet" in refused.errors
    assert server.job(job_id)["phase"] == "SUSPENDED" and server.job(job_id)["hook"] == "allreduce"
    assert "no Session of Ratchet" in cli("prove", job_id, expect=4).errors

    # A handler that ends the process in the middle of its work, at the cost of the other's collective, is the same stop.
    (work / "impatient").touch()
    server.call("POST", f"/v1/jobs/{job_id}/resume")
    held(server, job_id, 2)
    server.call("POST", f"/v1/jobs/{job_id}/cancel")
    server.wait_phase(job_id, "CANCELLED")
    attempt = server.attempts(job_id)[1]
    assert (attempt["cause"], attempt["outcome"]) == ("api-cancel", "cancelled"), attempt
    assert server.paths.job(job_id).attempt(2).log(0).read_text().startswith("from step 2, restart 1")
