"""Handwritten digits with Hugging Face's Trainer, as a job: killed, preempted or suspended, it goes on bit for bit.

ratchet submit trainer_train.yaml --follow
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction, TrainingArguments

from ratchet.transformers import Trainer

Sample = dict[str, torch.Tensor]


def load_digits() -> tuple[list[Sample], list[Sample]]:
    """scikit-learn's 1797 images of 8 x 8 pixels, every fifth of them for the test; read without importing scikit-learn."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations, "pip install scikit-learn"
    table = np.loadtxt(Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    images, labels = (
        torch.tensor(table[:, :64] / 16, dtype=torch.float32),
        torch.tensor(table[:, 64], dtype=torch.int64),
    )
    samples = [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    test = samples[::5]
    return [sample for n, sample in enumerate(samples) if n % 5], test


class Digits(nn.Module):
    """What the Trainer wants of a model: with labels, it gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.net(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    train, test = load_digits()
    arguments = TrainingArguments(
        output_dir="trainer",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=128,
        learning_rate=args.lr,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=Digits(),
        args=arguments,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
    )
    trainer.train()
    print(f"test accuracy {trainer.evaluate()['eval_accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
