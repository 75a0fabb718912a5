"""A net whose state takes half a megabyte, and whose steps take a millisecond: most of a run is saving."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts, TaskContext


class Faulty:
    """``held``: before these steps every rank makes the file ``at.STEP.RANK`` in ``gate`` and waits for ``go.STEP``.
    ``in_place``: before each step rank 0 saves as most scripts do, over this one file, and adds a byte to ``told`` beside it."""

    def __init__(
        self, steps: int = 60, gate: str = "", held: Sequence[int] = (), width: int = 256, in_place: str = ""
    ) -> None:
        self.in_place = Path(in_place) if in_place else None
        self.steps, self.gate, self.held, self.width = steps, Path(gate), set(held), width

    def build(self, ctx: TaskContext) -> Parts:
        self.rank = ctx.rank
        x = torch.randn(400, 64, generator=torch.Generator().manual_seed(1))
        wide = self.width
        model = nn.Sequential(nn.Linear(64, wide), nn.BatchNorm1d(wide), nn.Dropout(0.1), nn.Linear(wide, 64))
        data = TrainLoader(TensorDataset(x), batch_size=4, seed=ctx.seed, rank=ctx.rank, world_size=ctx.world_size)
        return Parts(model, torch.optim.AdamW(model.parameters(), lr=0.01), data, total_steps=self.steps)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[0])

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self.in_place is not None and self.rank == 0:
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.in_place)
            with self.in_place.with_name("told").open("ab") as told:
                told.write(b".")
        if step in self.held:
            (self.gate / f"at.{step}.{self.rank}").touch()
            while not (self.gate / f"go.{step}").exists():
                time.sleep(0.005)
