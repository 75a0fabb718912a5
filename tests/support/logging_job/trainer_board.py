"""Hugging Face's Trainer that reports to TensorBoard, or to MLflow: ``trainer_board.py WAY PLACE...``. Killed at each PLACE,
``ATTEMPT:STEP``. With the WAY ``plain`` or ``mlflow plain`` the callback is the Trainer's own."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from ratchet.transformers import Trainer


class Points(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, generator=torch.Generator().manual_seed(index))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


class Kills(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if f"{os.environ['RATCHET_ATTEMPT']}:{state.global_step}" in sys.argv[2:]:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, num_train_epochs=4, logging_steps=1, save_strategy="no",
        report_to="mlflow" if sys.argv[1].startswith("mlflow") else "tensorboard", eval_strategy="epoch",
        eval_on_start=True, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(Net(), arguments, train_dataset=Points(), eval_dataset=Points(), callbacks=[Kills()])
    if sys.argv[1].endswith("plain"):
        trainer._prepare_loggers = lambda: None  # type: ignore[method-assign]
    trainer.train()
