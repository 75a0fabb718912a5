"""Handwritten digits with Lightning: a DataModule, the best two checkpoints by validation loss, early stopping, and a test.

torchrun --nproc-per-node 2, and this file
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from ratchet.lightning import SessionStrategy


class Digits(LightningDataModule):
    """scikit-learn's 1797 images of 8 x 8 pixels, every fifth of them for the test."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        package = find_spec("sklearn")  # its file is read without importing it
        assert package is not None and package.submodule_search_locations, "pip install scikit-learn"
        file = Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz"
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
        images, labels = table[:, :64] / 16, table[:, 64].long()
        last = torch.arange(len(labels)) % 5 == 0
        self.last = TensorDataset(images[last], labels[last])
        known = TensorDataset(images[~last], labels[~last])
        self.train, self.val = random_split(known, [0.8, 0.2], torch.Generator().manual_seed(42))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.last, self.batch_size)


class Classifier(LightningModule):
    def __init__(self, hidden: int = 128, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        images, labels = batch
        self.log("val_loss", cross_entropy(self.net(images), labels), sync_dist=True)

    def test_step(self, batch: Any, _: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    seed_everything(42)
    best = ModelCheckpoint(save_top_k=2, monitor="val_loss", save_last=True)
    trainer = Trainer(
        strategy=SessionStrategy(),
        devices=2,
        accelerator="auto",
        max_epochs=args.epochs,
        callbacks=[best, EarlyStopping("val_loss", patience=3), LearningRateMonitor()],
        logger=CSVLogger("logs"),
        log_every_n_steps=5,
        enable_progress_bar=False,
    )
    data = Digits()
    trainer.fit(Classifier(), datamodule=data)
    found = trainer.test(ckpt_path="best", datamodule=data, verbose=False)
    if trainer.is_global_zero:
        print(f"best: {Path(best.best_model_path).name}, accuracy {found[0]['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
