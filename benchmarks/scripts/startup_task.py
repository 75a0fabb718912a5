"""The training of ``plain.py`` as a task, whose loop is Ratchet's."""

from __future__ import annotations

import sys
import time
from typing import Any

import stamps
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import LossResult, Parts, TaskContext


class StartupTask:
    """``place``: the file of the stamps."""

    def __init__(self, place: str) -> None:
        sys.argv[1:] = [place]
        stamps.stamp("script")
        stamps.stamp("torch")

    def build(self, ctx: TaskContext) -> Parts:
        stamps.stamp("group")
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        batches = TensorDataset(torch.randn(3200, 64))
        data = TrainLoader(batches, batch_size=32, seed=ctx.seed, rank=ctx.rank, world_size=ctx.world_size)
        stamps.stamp("ddp")
        return Parts(net, optimizer, data, total_steps=10**6)

    def loss(self, model: nn.Module, batch: Any) -> LossResult:
        return nn.functional.mse_loss(model(batch[0]), batch[0])

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        stamps.stamp("step")
        time.sleep(0.01)
