"""``digits``: a small convolutional net for scikit-learn's handwritten digits. Every fifth image is held back for the test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ratchet_contract.errors import UserError
from ratchet_worker.data.digest import tensors_digest
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.data.order import BatchIs, shard
from ratchet_worker.task import LossResult, Parts, Sums, TaskContext

HELD_BACK_EVERY: Final = 5
_FILE: Final = "datasets/data/digits.csv.gz"


class Digits:
    """A data set: images, float32 of shape (n, 1, 8, 8) in 0 .. 1, and labels, int64."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]

    def digest(self) -> str:
        return tensors_digest({"images": self.images, "labels": self.labels})


def load_digits() -> tuple[Digits, Digits]:
    """Return (training data, held-back data). Raises ``UserError`` if scikit-learn, or its file of the digits, is missing."""
    # Importing the package would cost every rank a second at start-up.
    spec = importlib.util.find_spec("sklearn")
    places = [Path(p) / _FILE for p in (spec.submodule_search_locations or [])] if spec else []
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        raise UserError("the digits come with scikit-learn, which is not installed here: pip install scikit-learn")
    table = np.loadtxt(path, delimiter=",", dtype=np.uint8)  # 64 pixels of 0 .. 16, then the label
    images = torch.from_numpy(table[:, :64].astype(np.float32) / 16).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(table[:, 64].astype(np.int64))
    held_back = torch.arange(len(labels)) % HELD_BACK_EVERY == 0
    return Digits(images[~held_back], labels[~held_back]), Digits(images[held_back], labels[held_back])


def shift(sample: tuple[torch.Tensor, torch.Tensor], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sample with its image shifted vertically and horizontally, by -1, 0 or 1 pixel each, drawn from
    ``generator``."""
    image, label = sample
    down, right = torch.randint(0, 3, (2,), generator=generator).tolist()
    return functional.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8], label


def make_net(width: int, dropout: float) -> nn.Sequential:
    """Return the model for images (batch, 1, 8, 8). ``width``: channels of the first layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        # A stride instead of pooling, whose backward pass on CUDA has no fixed order of additions.
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, 4 * width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, 10),
    )


class DigitsTask:
    """The task ``digits``. Arguments: ``epochs``, ``batch_size`` (per rank, or of the whole group with ``batch_is="global"``),
    peak ``lr``, ``momentum``, ``weight_decay``, ``dropout``, ``width`` (channels of the first layer), ``num_workers``, ``steps``
    (instead of ``epochs``), ``evaluate`` (False: no evaluation). Raises ``UserError`` if ``epochs``, ``width`` or ``steps`` is
    below 1.

    Metrics: ``loss`` and ``accuracy`` of the training batches, ``test_loss`` and ``test_accuracy`` after every epoch and
    at the end.
    """

    def __init__(
        self,
        epochs: int = 12,
        batch_size: int = 32,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        dropout: float = 0.25,
        width: int = 32,
        num_workers: int = 0,
        batch_is: BatchIs = "per_rank",
        steps: int | None = None,
        evaluate: bool = True,
    ) -> None:
        if epochs < 1 or width < 1 or (steps is not None and steps < 1):
            raise UserError("digits: epochs, width and steps must be at least 1")
        self.epochs, self.batch_size, self.batch_is, self.steps = epochs, batch_size, batch_is, steps
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.dropout, self.width, self.num_workers, self.evaluating = dropout, width, num_workers, evaluate
        self._held_back: tuple[torch.Tensor, torch.Tensor] | None = None

    def build(self, ctx: TaskContext) -> Parts:
        """Build the model, SGD, a one-cycle schedule, and the training data; keep this rank's share of the held-back images."""
        train, held_back = load_digits()
        loader = TrainLoader(
            train,
            batch_size=self.batch_size,
            batch_is=self.batch_is,
            seed=ctx.seed,
            rank=ctx.rank,
            world_size=ctx.world_size,
            num_workers=self.num_workers,
            augment=shift,
        )
        mine = shard(len(held_back), ctx.rank, ctx.world_size)
        self._held_back = held_back.images[mine.start : mine.stop], held_back.labels[mine.start : mine.stop]
        model = make_net(self.width, self.dropout).to(ctx.device)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=True
        )
        total = self.steps or self.epochs * loader.steps_per_epoch
        # One more than the number of steps: the loop steps the scheduler after the last optimizer step, too.
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=total + 1, cycle_momentum=False)
        return Parts(
            model,
            optimizer,
            loader,
            total_steps=total,
            scheduler=scheduler,
            evaluate_every=loader.steps_per_epoch if self.evaluating else None,
            digest=loader.data_digest(),
        )

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """The parameter shapes of the model that ``build`` makes, without allocating its memory."""
        with torch.device("meta"):
            return [tuple(p.shape) for p in make_net(self.width, self.dropout).parameters()]

    def loss(self, model: nn.Module, batch: Any) -> LossResult:
        """Return the cross-entropy of a batch of images and labels, and the accuracy as a metric."""
        images, labels = batch
        logits = model(images)
        return functional.cross_entropy(logits, labels), {"accuracy": (logits.argmax(1) == labels).float().mean()}

    def evaluation(self) -> Iterator[Any]:
        """Yield this rank's share of the held-back images, in one batch; nothing without evaluation or for an empty share."""
        if self.evaluating and self._held_back is not None and len(self._held_back[1]):
            yield self._held_back

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        """Return the number of right answers and the sum of the losses, each with the number of images as weight."""
        images, labels = batch
        logits = model(images)
        right = float((logits.argmax(1) == labels).sum())
        return {
            "test_accuracy": (right, float(len(labels))),
            "test_loss": (float(functional.cross_entropy(logits, labels, reduction="sum")), float(len(labels))),
        }
