"""A small module and its data, for ordinary scripts of Lightning. Rank 1 of a first attempt ends by SIGKILL behind a step."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

KILLED_BEHIND = 21
"""Of 32 steps, 8 in an epoch."""


class Net(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        first = os.environ.get("RATCHET_ATTEMPT") == "1" and os.environ["RANK"] == "1"
        if first and self.trainer.global_step == KILLED_BEHIND:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class Points(LightningDataModule):
    def setup(self, stage: str) -> None:
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        self.data = TensorDataset(x, (x.sum(1) > 0).long())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, 4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, 16)
