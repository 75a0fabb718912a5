"""A model of which each step uses a part only: what ``find_unused_parameters`` is for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ratchet import LossResult, Parts, TaskContext, TrainLoader


class Experts(nn.Module):
    """Each batch goes to the expert of its first value's sign; the others get no gradient from this rank in this step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(24, width), nn.ReLU()) for _ in range(2))
        self.out = nn.Linear(width, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.experts[int(x[0, 0] > 0)](x))
        return out


class ExpertsTask:
    """Arguments: ``steps``, ``width`` of an expert."""

    def __init__(self, steps: int = 500, width: int = 32) -> None:
        self.steps, self.width = steps, width

    def build(self, ctx: TaskContext) -> Parts:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(2048, 24, generator=generator)
        data = TensorDataset(inputs, inputs.abs() @ torch.randn(24, 12, generator=generator))
        model = Experts(self.width).to(ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        train = TrainLoader(data, batch_size=16, seed=ctx.seed, rank=ctx.rank, world_size=ctx.world_size)
        return Parts(model, optimizer, train, total_steps=self.steps)

    def loss(self, model: nn.Module, batch: Any) -> LossResult:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)
