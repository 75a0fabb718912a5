"""A Task with every method that a task may have: ``task: {entrypoint: "classifier:Classifier"}`` in the spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ratchet import LossResult, Parts, Sums, TaskContext, TrainLoader

Batch = tuple[torch.Tensor, torch.Tensor]


def numbers(count: int, seed: int) -> Batch:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x.sum(1) > 0).long()


class Classifier:
    def __init__(self, width: int = 16, steps: int = 40) -> None:
        self.width, self.steps = width, steps

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, self.width), nn.ReLU(), nn.Linear(self.width, 2))

    def build(self, ctx: TaskContext) -> Parts:
        self.share = slice(ctx.rank, None, ctx.world_size)  # this rank's part of the evaluation data
        model = self.net().to(ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = TrainLoader(
            TensorDataset(*numbers(256, seed=1)), batch_size=32, seed=ctx.seed, rank=ctx.rank, world_size=ctx.world_size
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return Parts(model, optimizer, data, total_steps=self.steps, scheduler=scheduler, evaluate_every=20)

    def loss(self, model: nn.Module, batch: Batch) -> LossResult:
        x, y = batch
        out = model(x)
        return nn.functional.cross_entropy(out, y), {"accuracy": (out.argmax(1) == y).float().mean()}

    def evaluation(self) -> Iterator[Batch]:
        x, y = numbers(64, seed=2)
        yield x[self.share], y[self.share]

    def evaluate(self, model: nn.Module, batch: Batch) -> Sums:
        x, y = batch
        return {"test_accuracy": (float((model(x).argmax(1) == y).sum()), float(len(y)))}

    def batch_to_device(self, batch: Batch, device: torch.device) -> Batch:
        x, y = batch
        return x.to(device), y.to(device)

    def before_step(self, model: nn.Module, optimizer: Any, step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        with torch.device("meta"):  # takes no memory
            return [tuple(p.shape) for p in self.net().parameters()]
