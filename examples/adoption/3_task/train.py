"""Handwritten digits under DistributedDataParallel, gradients compressed by PowerSGD, as a task.

ratchet submit train.yaml --follow
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from ratchet import LossResult, Parts, Sums, TaskContext, TrainLoader


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1797 images of 8 x 8 pixels, every fifth of them for the test; read without importing scikit-learn."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations, "pip install scikit-learn"
    table = np.loadtxt(Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    images = torch.tensor(table[:, :64] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(table[:, 64], dtype=torch.int64)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class DigitsTask:
    """What is trained; Ratchet runs the loop."""

    def __init__(self, epochs: int = 10, lr: float = 0.05) -> None:
        self.epochs, self.lr = epochs, lr

    def build(self, ctx: TaskContext) -> Parts:
        torch.manual_seed(0)
        train, self.test = load_digits()
        self.rank, self.world_size = ctx.rank, ctx.world_size
        data = TrainLoader(train, batch_size=32, seed=0, rank=ctx.rank, world_size=ctx.world_size)
        net = make_net().to(ctx.device)
        optimizer = torch.optim.SGD(net.parameters(), lr=self.lr, momentum=0.9)
        return Parts(net, optimizer, data, epochs=self.epochs)

    def loss(self, model: nn.Module, batch: Any) -> LossResult:
        images, labels = batch
        return cross_entropy(model(images), labels), {}

    def evaluation(self) -> Iterator[Any]:
        """This rank's share of the test images, as one batch."""
        yield tuple(tensor[self.rank :: self.world_size] for tensor in self.test.tensors)

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        images, labels = batch
        return {"test_accuracy": (float((model(images).argmax(1) == labels).sum()), float(len(labels)))}
