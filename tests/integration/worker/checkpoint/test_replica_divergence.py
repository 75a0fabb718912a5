"""Replicas that differ: the first tensor is named, and the cause that was planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from tests.support.launch import Job

TASK = """
import torch
from torch import nn
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts


class Planted:
    def __init__(self, way):
        self.way = way

    def build(self, context):
        torch.manual_seed(1)
        self.rank, self.steps = context.rank, 0
        norm = 0.5 if self.way == "renorm" else None
        self.net = nn.Sequential(nn.Embedding(16, 8, max_norm=norm), nn.Linear(8, 8))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        data = TrainLoader(torch.randint(16, (64,)), batch_size=4, seed=3, rank=context.rank, world_size=context.world_size)
        return Parts(model=self.net, optimizer=self.optimizer, train=data, total_steps=30)

    def loss(self, model, batch):
        return model(batch).square().mean() if self.way != "past" else self.net(batch).square().mean()

    def before_step(self, model, optimizer, step):
        with torch.no_grad():
            if self.way == "one rank" and self.rank == 0:
                model[1].weight.mul_(0.9)
            if self.way == "own draw":
                model[1].bias.add_(torch.randn(8, generator=torch.Generator().manual_seed(self.rank)))
            if self.way == "rates":
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.rank)
            if self.way == "sizes":
                optimizer.state[model[1].weight]["sizes"] = torch.zeros(200_000 if self.rank == 1 else 3)
"""
CAUSES = {
    "renorm": ("model/0.weight", "Embedding 0 scales rows down in its forward pass (max_norm)"),
    "rates": ("model/", "lr of optimizer is 0.1 on rank 0, 0.05 on rank 1"),
    "past": ("model/", "steps had no synchronised backward"),
    "one rank": ("1.weight", "`if rank == 0`"),
    "own draw": ("1.bias", "code other than the optimizer changes 1.bias by values that differ between ranks"),
    "sizes": ("1.weight/sizes", "1.weight/sizes does not have the same size on all ranks: build the same model"),
}


@pytest.fixture
def jobs(tmp_path: Path) -> Any:
    code = tmp_path / "code"
    code.mkdir()
    (code / "planted.py").write_text(TASK)
    made = {
        way: Job(
            tmp_path / f"job-{number}",
            {
                "task": {"entrypoint": "planted:Planted", "args": {"way": way}},
                "checkpoint": {"every_steps": 1},
            },
            code,
        )
        for number, way in enumerate(CAUSES)
    }
    yield made
    for job in made.values():
        job.close()


def test_diverged_replicas_are_reported_with_tensor_and_likely_cause(jobs: dict[str, Job]) -> None:
    attempts = {way: job.launch() for way, job in jobs.items()}
    told = {way: attempt.wait() for way, attempt in attempts.items()}
    for way, (tensor, likely) in CAUSES.items():
        text = str(told[way].message)
        assert told[way].cause is Cause.CHECKPOINT_ERROR, attempts[way].logs()
        assert "replicas have diverged" in text and "Likely cause: " in text, text
        assert tensor in text and likely in text, (way, text)
        assert jobs[way].checkpoints() == []
