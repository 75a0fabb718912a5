"""Handwritten digits with Lightning, as a job: killed, preempted or suspended, it goes on bit for bit.

ratchet submit lightning_train.yaml --follow
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ratchet.lightning import SessionLogger, SessionStrategy


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1797 images of 8 x 8 pixels, every fifth of them for the test; read without importing scikit-learn."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations, "pip install scikit-learn"
    table = np.loadtxt(Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    images, labels = (
        torch.tensor(table[:, :64] / 16, dtype=torch.float32),
        torch.tensor(table[:, 64], dtype=torch.int64),
    )
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


class Digits(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(64, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    train, test = load_digits()
    trainer = Trainer(
        strategy=SessionStrategy(),
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        logger=SessionLogger(),
        log_every_n_steps=5,
        enable_progress_bar=False,
    )
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    trainer.fit(Digits(args.lr), loader, DataLoader(test, batch_size=128))
    if trainer.is_global_zero and "accuracy" in trainer.callback_metrics:
        print(f"test accuracy {float(trainer.callback_metrics['accuracy']):.4f}", flush=True)


if __name__ == "__main__":
    main()
