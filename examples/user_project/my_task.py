"""A task of one's own: Ratchet runs the loop, this file says what is trained.

It stands beside ``hooks.py``, ``worker.py`` and ``service.py`` and imports them, as training repositories do: nothing of
Ratchet is named like that, so the right files are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hooks import clip_gradients
from ratchet import LossResult, Parts, Sums, TaskContext, TrainLoader
from service import correct
from worker import Tumours, jitter


class TumourTask:
    """A multilayer perceptron with dropout that tells benign from malignant tumours."""

    def __init__(self, epochs: int = 30, width: int = 64, batch_size: int = 16, lr: float = 0.05) -> None:
        self.epochs, self.width, self.batch_size, self.lr = epochs, width, batch_size, lr

    def build(self, ctx: TaskContext) -> Parts:
        """Everything that has state goes into ``Parts``; what is there comes back bit for bit after a kill."""
        self.device, self.rank, self.world_size = ctx.device, ctx.rank, ctx.world_size
        model = nn.Sequential(
            nn.Linear(30, self.width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(self.width, self.width), nn.ReLU(),
            nn.Linear(self.width, 2),
        ).to(ctx.device)  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)
        train = TrainLoader(
            Tumours(train=True), batch_size=self.batch_size, seed=ctx.seed, rank=ctx.rank, world_size=ctx.world_size,
            augment=jitter,
        )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.epochs * train.steps_per_epoch)
        return Parts(model, optimizer, train, epochs=self.epochs, scheduler=scheduler)

    def loss(self, model: nn.Module, batch: Any) -> LossResult:
        inputs, labels = batch
        scores = model(inputs)
        return nn.functional.cross_entropy(scores, labels), {"accuracy": correct(scores, labels) / len(labels)}

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        clip_gradients(model, max_norm=5.0)

    def evaluation(self) -> Iterator[Any]:
        """This rank's share of the test data, as one batch."""
        test = Tumours(train=False)
        mine = slice(self.rank, None, self.world_size)
        yield test.inputs[mine], torch.tensor(test.labels[mine])

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        inputs, labels = batch
        return {"test_accuracy": (float(correct(model(inputs), labels)), float(len(labels)))}
