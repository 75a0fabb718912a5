"""Lightning's Trainer with its TensorBoardLogger: ``lightning_board.py WAY PLACE...``. Killed at each PLACE, ``ATTEMPT:STEP``.
With the WAY ``plain`` the logger opens its own writer, as without Ratchet."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ratchet.lightning import SessionStrategy


class Net(LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Linear(width, 2))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Kills(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if f"{os.environ['RATCHET_ATTEMPT']}:{trainer.global_step}" in sys.argv[2:]:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    seed_everything(1)
    points = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))
    logger: Any = TensorBoardLogger("logs")
    if sys.argv[1].startswith("mlflow"):
        logger = MLFlowLogger(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
    if sys.argv[1].endswith("plain"):
        SessionStrategy._set_writers = lambda *_: None  # type: ignore[method-assign]
    trainer = Trainer(
        strategy=SessionStrategy(), devices=1, max_epochs=4, log_every_n_steps=1, logger=logger, callbacks=[Kills()],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(points, 4, shuffle=True), DataLoader(points, 8))
