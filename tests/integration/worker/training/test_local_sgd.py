"""A script's job under post-local SGD on two real ranks, killed between two averagings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import ForkSource
from ratchet_store.read.checkpoint_reader import CheckpointReader
from ratchet_store.read.compare import compare, render
from tests.support.launch import Job

STEPS, START, PERIOD = 12, 4, 3  # averaged after steps 5, 8 and 11
SCRIPT = '''
"""Accumulates, scales, averages weights and looks at the other ranks' features; rank 1 overflows once, and dies once."""
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from ratchet_contract.errors import UserError
from ratchet_worker.session import Session

total, mark = int(sys.argv[1]), Path(sys.argv[2])


class Average:
    def __init__(self, module):
        self.values = {n: p.detach().clone() for n, p in module.named_parameters()}

    def update(self, module):
        for name, p in module.named_parameters():
            self.values[name].lerp_(p.detach(), 0.1)

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = {n: t.clone() for n, t in state.items()}


class Losses:
    sum = 0.0

    def state_dict(self):
        return {"sum": self.sum}

    def load_state_dict(self, state):
        self.sum = state["sum"]


with Session() as s:
    module = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    model = s.wrap(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
    average = Average(module)
    losses = Losses()
    s.register(optimizer=optimizer, scaler=scaler, average=average, losses=losses)
    for step in s.steps(total):
        for last in (False, True):
            numbers = torch.Generator().manual_seed(100 * step + 10 * s.rank + last)
            x = torch.randn(8, 6, generator=numbers)
            model.require_backward_grad_sync = last
            features = model(x)
            everyone = s.all_gather(features)
            loss = features.square().mean() + (features.mean(0) - everyone.mean((0, 1))).square().sum()
            if (s.rank, step) == (1, 5) and last:
                loss = loss + float("inf") * features.sum()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update(module)
        losses.sum += float(loss.detach()) if step != 5 else 0.0
        if step == 5:
            own = s.all_gather(module[0].weight.detach().clone())
            with s.evaluation() as ev:
                seen = ev.gather(module[0].weight.tolist())
            assert all(one == seen[0] for one in seen) and not torch.equal(own[0], own[1])
            assert torch.allclose(torch.tensor(seen[0]), own.mean(0), atol=1e-6)
            assert torch.equal(module[0].weight, own[s.rank])
        if s.rank == 1 and step == 6 and mark.exists():
            mark.unlink()
            while not list(Path(os.environ["RATCHET_LAUNCH_FILE"]).parents[2].glob("checkpoints/*6.a*/MANIFEST.json")):
                time.sleep(0.01)  # what was due is written beside the training; the agent's deadline ends a wait in vain
            os.kill(os.getpid(), signal.SIGKILL)
    with s.evaluation() as ev:
        try:
            s.all_gather(torch.zeros(1))
        except UserError as error:
            print("refused:", error)
'''


def _job(tmp_path: Path, job_id: str, steps: int = STEPS, **changes: Any) -> Job:
    project = tmp_path / job_id
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    spec = {
        "script": ["train.py", str(steps), str(project / "die")],
        "code": {"path": str(project)},
        "hook": {
            "name": "post_localSGD",
            "start_localSGD_iter": START,
            "subgroup_size": 1,
            "model_averaging_period": PERIOD,
        },
        "ddp": {"bucket_cap_mb": 0.0003},
        "checkpoint": {"every_steps": 2, "keep_last": 10, "first": "off"},
    }
    return Job(tmp_path, spec | changes, project, job_id=job_id)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    made = [_job(tmp_path, "whole"), _job(tmp_path, "cut")]
    (tmp_path / "cut" / "die").touch()
    yield made
    for job in made:
        job.close()


def test_local_sgd_job_killed_between_averagings_resumes_exactly(tmp_path: Path, jobs: list[Job]) -> None:
    whole, cut = jobs
    attempt = whole.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert "refused: all_gather of tensors in an evaluation" in attempt.paths.log(1).read_text()
    told = {m.summary.step: m.summary for m in attempt.messages(rank=1, kind="hook")}
    seen = {step: (s.phase, s.iteration, s.averager_step, s.next_averaging) for step, s in told.items()}
    saved = {
        2: ("warm-up", 2, 2, 5),
        4: ("local", 4, 4, 5),
        6: ("local", 6, 6, 8),
        8: ("local", 8, 8, 11),
        10: ("local", 10, 10, 11),
        12: ("local", 12, 12, 14),
    }
    assert {
        step: seen.get(step) for step in saved
    } == saved  # a run of more than a second reports steps between them too

    attempt = cut.launch()
    assert attempt.wait().cause is Cause.RANK_KILLED, attempt.logs()
    attempt = cut.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    report = attempt.report()
    assert (report.base.step, report.verdict) == (6, "exact"), report
    comparison = compare(whole.newest(), cut.newest())
    assert comparison.identical, render(comparison)

    reader = CheckpointReader(cut.newest())
    assert reader.manifest.replicas == "subgroup"
    for part in ("model", "optimizer", "user:average"):
        mine, other = (reader.tensors(f"rank/{rank}/{part}/") for rank in (0, 1))
        bits = [[bytes(tensor.data) for _, tensor in sorted(side.items())] for side in (mine, other)]
        assert bits[0] and bits[0] != bits[1], part  # it ended between two averagings
    assert reader.state(0)["scaler"] != reader.state(1)["scaler"]

    # Under a hook that keeps replicas equal ranks with scales of their own would undo other ones than their gradients carry.
    source = reader.manifest
    fork = ForkSource(job_root=str(cut.paths.root), step=source.step, attempt=source.attempt, digest=source.digest)
    changes = {"hook": {"name": "allreduce"}, "policy": {"on_hook_mismatch": "reset"}}
    together = _job(tmp_path, "together", steps=STEPS + 2, **changes)
    jobs.append(together)
    attempt = together.launch(fork=fork)
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    told = {(c.component, c.rank): (c.status, c.reason or "") for c in attempt.report().components}
    for rank in range(2):
        assert told["scaler", rank] == (
            "redistributed",
            "from rank 0: the values of the ranks differed, and have no mean",
        )
        assert told["user:average", rank] == told["model", rank]
        assert told["user:average", rank] == ("redistributed", "the mean over 2 ranks, whose replicas differed")
        assert told["user:losses", rank][0] == "not-exact" and "kept per rank" in told["user:losses", rank][1]
    reader = CheckpointReader(together.newest())
    averages = [[bytes(t.data) for _, t in sorted(reader.tensors(f"rank/{r}/user:average/").items())] for r in (0, 1)]
    assert averages[0] == averages[1] and reader.state(0)["user:losses"] != reader.state(1)["user:losses"]
    assert reader.manifest.replicas == "equal" and reader.state(0)["scaler"] == reader.state(1)["scaler"]
