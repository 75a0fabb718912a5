"""The training of the picture of kills, as both of its scripts do it: handwritten digits, a small net, batches that follow from
the step and the rank."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

STEPS = 250
EVERY = 20
"""Steps between checkpoints."""
KILLS = (70, 130, 190)
"""Numbers of completed steps after which a process is killed."""
RANK, WARM_UP = 1, 10
"""Of PowerSGD."""


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's 1797 images of 8 x 8 pixels, and their digits; read without importing scikit-learn."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations, "pip install scikit-learn"
    table = np.loadtxt(Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    images = torch.tensor(table[:, :64] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return images, torch.tensor(table[:, 64], dtype=torch.int64)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)


def train_step(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[torch.Tensor, torch.Tensor], step: int, rank: int
) -> float:
    """One step on 32 images; the loss over all images after it."""
    images, digits = data
    chosen = torch.randint(len(images), (32,), generator=torch.Generator().manual_seed(1000 * step + rank))
    cross_entropy(ddp(images[chosen]), digits[chosen]).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return cross_entropy(ddp.module(images), digits).item()  # type: ignore[operator, union-attr]


def kill_once(step: int, rank: int) -> None:
    """SIGKILL to this process if it is rank 1 and has done ``step`` steps, one of ``KILLS``; once for each in this directory."""
    mark = Path(f"killed-{step}")
    if step in KILLS and rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def write_loss(step: int, loss: float, rank: int) -> None:
    """Add a line to ``losses.txt`` on rank 0: how many steps are done, and the loss after them."""
    if rank == 0:
        with Path("losses.txt").open("a") as lines:
            print(step, repr(loss), file=lines)
