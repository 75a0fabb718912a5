"""A run without a service that a job adopts: killed anywhere, it ends in the bits of the run that nobody touched."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.job_files.delete_job import sweep_deleted
from ratchet_store.read.compare import compare, render
from tests.support.cli import Cli
from tests.support.fork_server import RANKS
from tests.support.full_matrix import FULL
from tests.support.server import Server

STEPS = 24
TASK = {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask"}
SCRIPT = """
import os, signal, sys

import torch
from torch import nn

import settings
from ratchet import Session, TrainLoader


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, (x.sum() > 0).long()


def train():
    with Session(hook=settings.HOOK, seed=3, checkpoint={"every_steps": 5, "first": "off"}) as session:
        data = TrainLoader(Points(), batch_size=4, seed=session.seed, rank=session.rank, world_size=session.world_size)
        net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 2))
        model = session.wrap(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        session.register(optimizer=optimizer, data=data)
        batches = session.batches()
        for step in session.steps(int(sys.argv[1])):
            x, y = next(batches)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if os.environ.get("KILL") == f"{session.rank} {step}":
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train()
"""
ADOPTING = """
import json, sys, time
from contextlib import ExitStack
from pathlib import Path

from ratchet_contract.paths import HomePaths
from ratchet_service.launchers.registry import load
from ratchet_service.scheduling.machine import Machine
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.usecases import adopt_run

homes = HomePaths(Path(sys.argv[1]))
ports = LocalSubmission(homes, Machine((), 2), load(homes, None))
with ExitStack() as until_stored:
    adopt_run.prepare(json.loads(sys.argv[2]), sys.argv[3], ports, homes, until_stored)
    print("copied", flush=True)
    time.sleep(600)
"""
"""An adoption whose job is not stored yet."""
POWER = {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 4}
LOCAL = {"name": "post_localSGD", "start_localSGD_iter": 6, "model_averaging_period": 3}
CASES = [(2, POWER)]
if FULL:
    CASES += [(1, {"name": "allreduce"}), (2, LOCAL), (2, {**POWER, "wrapper": "fp16"}), (3, POWER)]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def _project(at: Path, hook: dict[str, Any], *, made: bool = False) -> Path:
    at.mkdir(exist_ok=made)
    (at / "train.py").write_text(SCRIPT)
    (at / "settings.py").write_text(f"HOOK = {hook!r}\n")
    return at


def _train(project: Path, ranks: int = 1, kill: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "KILL": kill, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [*TORCHRUN, str(ranks)] if ranks > 1 else []
    return RANKS.run([sys.executable, *launcher, "train.py", str(STEPS)], cwd=project, env=environ)


def _spec(project: Path, ranks: int, hook: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": "adopting",
        "script": ["train.py", str(STEPS)],
        "code": {"path": str(project)},
        "world": {"ranks_per_node": ranks, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "hook": hook,
        "seed": 3,
        "checkpoint": {"every_steps": 5},
        "policy": {"max_failures": 0},
        **more,
    }


def _submitted(cli: Cli, spec: dict[str, Any], directory: Path, *options: str, expect: int = 0) -> Any:
    (cli.cwd / "job.yaml").write_text(yaml.safe_dump(spec))
    return cli("submit", "job.yaml", "--adopt", str(directory), *options, expect=expect)


def _content(root: Path) -> dict[str, str]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _base(run: Path) -> int:
    """Step of its newest checkpoint: the save before a kill may not have ended."""
    return max(int(path.parent.name[5:17]) for path in (run / "checkpoints").glob("*/MANIFEST.json"))


def _newest(root: Path) -> Path:
    return max((root / "checkpoints").glob(f"step-{STEPS:012d}.*"))


@pytest.mark.parametrize(("ranks", "hook"), CASES, ids=[f"{ranks}-{hook['name']}" for ranks, hook in CASES])
def test_killed_run_adopted_by_a_job_resumes_exactly(
    server: Server, tmp_path: Path, ranks: int, hook: dict[str, Any]
) -> None:
    cli = Cli(server.home, tmp_path)
    whole, project = _project(tmp_path / "whole", hook), _project(tmp_path / "project", hook)
    assert (done := _train(whole, ranks)).returncode == 0, done.stderr
    at = random.choice([12, 13, 14, 17, 18, 19])  # steps that are behind a checkpoint
    assert _train(project, ranks, kill=f"{ranks - 1} {at}").returncode != 0
    run = project / "ratchet-checkpoints"
    before = _content(run)
    base = _base(run)

    told = _submitted(cli, _spec(project, ranks, hook), run, "--wait", "--json")
    job = json.loads(told.text)
    assert (job["phase"], job["adopted_from"]) == ("SUCCEEDED", str(run)), told
    (attempt,) = server.attempts(job["id"])
    report, redone = attempt["resume_report"], attempt["redone"]
    assert (report["verdict"], report["base"]["step"]) == ("exact", base), report
    assert f"adopted from the run in {run}, step {base} of its start 1" in report["notes"]
    assert (redone["steps"], redone["compared"], redone["equal"]) == (at - base,) * 3, redone
    same = compare(_newest(whole / "ratchet-checkpoints"), _newest(server.paths.job(job["id"]).root))
    assert not same.different and same.tensors, f"killed in step {at}: {render(same)}"
    copy = server.paths.job(job["id"]).root / "adopted"
    assert copy.is_dir()
    server.call("DELETE", f"/v1/jobs/{job['id']}")
    assert not copy.exists() and _content(run) == before


def test_run_command_with_adopt_resumes_a_run_and_hints_at_adopt_without(server: Server, tmp_path: Path) -> None:
    hook = {"name": "allreduce"}
    cli, project = Cli(server.home, tmp_path), _project(tmp_path, hook, made=True)
    assert _train(project, 1, kill="0 12").returncode != 0
    base = _base(project / "ratchet-checkpoints")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(_spec(project, 1, hook)))
    ended = _spec(project, 1, hook, trial={"end_at": 3})
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(ended))
    begins = cli("run", "short.yaml").errors
    assert "this job begins at step 0, and `ratchet run --adopt ratchet-checkpoints ...` continues from it" in begins
    goes_on = cli("run", "--adopt", "ratchet-checkpoints", "job.yaml").errors
    assert f"continues from step {base} of " in goes_on and "begins at step 0" not in goes_on, goes_on
    redone = 12 - base
    assert "SUCCEEDED" in goes_on and f"exact, proved ({redone} of {redone} redone steps)" in goes_on, goes_on


def test_adopt_that_does_not_match_the_run_is_refused(server: Server, tmp_path: Path) -> None:
    cli, project = Cli(server.home, tmp_path), _project(tmp_path / "project", POWER)
    run = project / "ratchet-checkpoints"

    def refused(directory: Path, pointer: str, code: str, said: str, **changes: Any) -> None:
        before = {path.name for path in server.paths.jobs.iterdir()} if server.paths.jobs.exists() else set()
        spec = {k: v for k, v in (_spec(project, 1, POWER) | changes).items() if v is not None}
        answer = server.call("POST", "/v1/jobs", params={"adopt": str(directory)}, json=spec, expect=422).json()
        told = [(e["pointer"], e["code"]) for e in answer["errors"]]
        assert (pointer, code) in told and said in str(answer["errors"]), answer
        assert {path.name for path in server.paths.jobs.iterdir()} == before  # no copy stays

    refused(run, "/query/adopt", "adopt-not-found", "there first, with its whole directory")
    refused(project, "/query/adopt", "adopt-no-run", "ratchet-run.json")
    assert _train(project, kill="0 3").returncode != 0
    refused(run, "/query/adopt", "adopt-no-checkpoint", "no checkpoint yet")
    assert _train(project, kill="0 17").returncode != 0

    refused(run, "/hook", "hook-mismatch", "on_hook_mismatch", hook="allreduce")
    refused(run, "/world/ranks_per_node", "world-size-mismatch", "redistribute", world={"ranks_per_node": 2})
    refused(run, "/seed", "adopt-differs", "3 in the run, 4 in this spec", seed=4, determinism="strict")
    for pointer, said, changes in (
        ("/script", "in this spec; such a resume is never exact", {"script": ["train.py", "99"]}),
        ("/ddp/bucket_cap_mb", "1.0 in this spec; such a resume is never exact", {"ddp": {"bucket_cap_mb": 1}}),
        ("/resources/cpus_per_rank", "1 thread per rank in the run", {"resources": {"cpus_per_rank": 2}}),
    ):
        refused(run, pointer, "adopt-differs", said, determinism="strict", **changes)
    refused(run, "/task", "adopt-needs-script", "Session", script=None, task=TASK)
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04")
    start = {"path": str(tmp_path / "model.pt")}
    refused(run, "/start_from", "fork-start", "starts from a checkpoint of the run", start_from=start)
    (project / "plain.py").write_text("print()\n")
    refused(run, "/script", "adopt-unmanaged", "no Session", script=["plain.py"], hook="allreduce")
    (project / "plain.py").unlink()
    with (run / "agent.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "stop it" in _submitted(cli, _spec(project, 1, POWER), run, expect=4).errors
    newest = max((run / "attempts").iterdir())
    (newest / "base.json").write_text('{"step": 5, "attempt": 9}')
    refused(run, "/query/adopt", "adopt-damaged", "attempt 9")
    (run / "ratchet-run.json").write_text("[" * 100_000)
    refused(run, "/query/adopt", "adopt-no-run", "ratchet-run.json")


def test_copy_for_a_job_that_was_never_stored_is_deleted_at_the_next_start(server: Server, tmp_path: Path) -> None:
    project = _project(tmp_path / "project", POWER)
    assert _train(project, kill="0 17").returncode != 0
    spec = json.dumps(_spec(project, 1, POWER))
    argv = [sys.executable, "-c", ADOPTING, str(server.home), spec, str(project / "ratchet-checkpoints")]
    before = set(server.paths.jobs.glob("*"))
    database = Database(sqlite_url(server.paths.database))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as adopting:
        try:
            assert adopting.stdout is not None and adopting.stdout.readline() == "copied\n"
            (job,) = {*server.paths.jobs.iterdir()} - before
            assert sweep_deleted(database, server.paths) == [] and (job / "adopted").is_dir()
        finally:
            adopting.kill()
    assert sweep_deleted(database, server.paths) == [job.name] and not job.exists()
    database.dispose()


def test_adopt_of_an_ended_run_is_refused_unless_more_steps_may_follow(server: Server, tmp_path: Path) -> None:
    """What the run imported beside the script is not known before the job starts: then a warning, and advice that works."""
    cli, alone, project = Cli(server.home, tmp_path), tmp_path / "alone", _project(tmp_path / "project", POWER)
    alone.mkdir()
    (alone / "train.py").write_text(SCRIPT.replace("import settings", "").replace("settings.HOOK", repr(POWER)))
    for place in (alone, project):
        assert (done := _train(place)).returncode == 0, done.stderr
    spec, run = _spec(alone, 1, POWER), alone / "ratchet-checkpoints"
    answer = server.call("POST", "/v1/jobs", params={"adopt": str(run)}, json=spec, expect=409).json()
    assert answer["code"] == "nothing-left" and f"has ended with step {STEPS}" in answer["detail"]
    (alone / "settings.yaml").write_text("")  # the script may ask for more because of it
    assert "adopt-finished" in _submitted(cli, spec, run).errors
    (alone / "settings.yaml").unlink()
    more = spec | {"script": ["train.py", str(STEPS + 6)]}
    told = _submitted(cli, more, run, "--wait")
    assert "adopt-finished" in told.errors and "adopt-differs" in told.errors
    (attempt,) = server.attempts(told.text.strip())
    assert attempt["resume_report"]["verdict"] == "not-exact", attempt

    told = _submitted(cli, _spec(project, 1, POWER), project / "ratchet-checkpoints", "--wait", expect=1)
    assert "adopt-finished" in told.errors and "continue with the same code" not in told.errors
    job = told.text.strip()
    assert f"`ratchet resume {job} --code DIR`" in told.errors
    script = project / "train.py"
    script.write_text(script.read_text().replace("int(sys.argv[1])", str(STEPS + 6)))
    cli("resume", job, "--code", str(project))
    cli("wait", job)
    assert [attempt["base"]["step"] for attempt in server.attempts(job)] == [STEPS, STEPS]


def test_adopt_with_other_code_is_named_and_other_seed_or_damage_refused(server: Server, tmp_path: Path) -> None:
    cli, project = Cli(server.home, tmp_path), _project(tmp_path / "project", POWER)
    run = project / "ratchet-checkpoints"
    assert _train(project, kill="0 17").returncode != 0
    before = _content(run)
    (project / "settings.py").write_text(f"HOOK = {POWER!r}\nRATE = 1\n")
    assert "set it to 3" in _submitted(cli, _spec(project, 1, POWER, seed=4), run, expect=5).errors
    told = _submitted(cli, _spec(project, 1, POWER), run, "--wait")
    (attempt,) = server.attempts(told.text.strip())
    found = {d["key"] for d in attempt["resume_report"]["differences"]}
    assert (attempt["resume_report"]["verdict"], found) == ("not-exact", {"code_digest"})
    assert attempt["redone"]["reason"].startswith("the resume is not exact")

    newest = max((run / "checkpoints").glob("step-*/MANIFEST.json")).parent
    (rank_file,) = newest.glob("rank-*")
    assert _content(run) == before
    whole = rank_file.read_bytes()
    rank_file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    damaged = _submitted(cli, _spec(project, 1, POWER), run, expect=5).errors
    assert f"{rank_file}" in damaged and "move the damaged one away" in damaged, damaged
