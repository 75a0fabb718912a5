"""Copies of the state in memory: what a killed rank, a damaged copy and a killed agent leave for the next attempt."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.compare import compare
from tests.support.launch import Attempt, Job

TOTAL = 12
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.session import Session

FOLDER, TOTAL = Path(sys.argv[1]), int(sys.argv[2])
KILLS = [argument.split(":") for argument in sys.argv[3:]]  # step:rank:place, each once


def at(session, place):
    step = session.step + 1
    (FOLDER / f"rank-{session.rank}").write_text(str(step))
    for number, (wanted, rank, where) in enumerate(KILLS):
        flag = FOLDER / f"kill-{number}"
        if (int(wanted), int(rank), where) == (step, session.rank, place) and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


session = Session()
torch.manual_seed(1)
model = session.wrap(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
data = TrainLoader(TensorDataset(torch.randn(64, 64)), batch_size=4, seed=3, rank=session.rank, world_size=session.world_size)
session.register(optimizer=optimizer, scheduler=scheduler, data=data)
batches = session.batches()
for _ in session.steps(TOTAL):
    at(session, "begin")
    (x,) = next(batches)
    loss = model(x + torch.randn(x.shape)).square().mean()
    loss.backward()
    at(session, "backward")
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    session.log({"loss": loss})
    at(session, "end")
session.finish()
"""
POWER_SGD = {"name": "powerSGD", "matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}

Make = Callable[..., Job]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Job] = []

    def job(*kills: str, ranks: int = 2, name: str = "job", **spec: Any) -> Job:
        folder = tmp_path / name
        code = folder / "code"
        code.mkdir(parents=True)
        (code / "train.py").write_text(SCRIPT)
        whole = {
            "script": ["train.py", str(folder), str(TOTAL), *kills],
            "code": {"path": str(code)},
            "world": {"ranks_per_node": ranks, "device": "cpu"},
            "hook": POWER_SGD,
            "checkpoint": {"every_steps": 100, "first": "off", "memory_every_steps": 1},
            **spec,
        }
        made.append(Job(folder / "home", whole, code))
        return made[-1]

    yield job
    for one in made:
        one.close()


def notes(attempt: Attempt) -> dict[str, str]:
    """The agent's notes of the job's history, by type."""
    paths = attempt.paths.node_spool(0)
    found = attempt.messages_in(paths) if paths.exists() else []
    return {message.type: message.message for message in found if message.kind == "note"}


def assert_same_end(job: Job, other: Job) -> None:
    found = compare(job.newest(), other.newest())
    assert found.identical, found


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_rank_loses_at_most_one_step(make: Make, ranks: int) -> None:
    """Kills at drawn steps and places; no checkpoint is due before the end."""
    source = random.Random(ranks)
    kills = [
        f"{step}:{source.randrange(ranks)}:{place}"
        for step, place in zip((1, 4, 7, 9), source.sample(["begin", "backward", "end", "begin"], 4), strict=True)
    ]
    job = make(*kills, ranks=ranks)
    for number, kill in enumerate(kills):
        attempt = job.launch()
        result = attempt.wait(180)
        assert result.cause is Cause.RANK_KILLED, attempt.logs()
        step = int(kill.partition(":")[0])
        if step == 1:
            assert job.checkpoints() == []
            continue
        newest = read_manifest(job.newest())
        assert newest.step in (step - 1, step - 2) and newest.attempt == number + 1 and newest.reason == "memory"
        assert (
            result.message is not None and f"step {newest.step} was saved from the copies in memory" in result.message
        )
        assert "continues from it" in notes(attempt)["checkpoint-from-memory"]
    last = job.launch()
    assert last.wait(180).cause is Cause.COMPLETED, last.logs()
    assert last.report().verdict == "exact" and last.report().base.attempt == len(kills)
    assert len(job.checkpoints()) == len(kills)  # three of copies, and the end
    undisturbed = make(name="undisturbed", ranks=ranks, checkpoint={"every_steps": 100, "first": "off"})
    whole = undisturbed.launch()
    assert whole.wait(180).cause is Cause.COMPLETED, whole.logs()
    assert_same_end(job, undisturbed)
