"""With the logger that ``argv[1]`` names; or what it names is done before ``fit``."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from small import Net, Points

from ratchet.lightning import SessionStrategy

if __name__ == "__main__":
    seed_everything(1)
    kind, net, data = sys.argv[1], Net(), Points()
    loggers: dict[str, Any] = {"board": lambda: TensorBoardLogger("logs"), "csv": lambda: CSVLogger("logs")}
    logger = loggers[kind]() if kind in loggers else False
    callbacks: list[Any] = [OnExceptionCheckpoint(".")] if "ckpt_path" in kind else []
    trainer = Trainer(
        strategy=SessionStrategy(), devices=2, max_epochs=4, log_every_n_steps=2, logger=logger, callbacks=callbacks
    )
    if kind == "tune":
        Tuner(trainer).lr_find(net, datamodule=data, num_training=4)
    if kind == "fit":
        trainer.fit(net, datamodule=data)
    trainer.validate(net, datamodule=data)
    if kind == "own ckpt_path":
        Path("on_exception.ckpt").touch()  # as an exception leaves it: the Trainer itself requests it
    if kind == "set ckpt_path":
        trainer.ckpt_path = "x.ckpt"
    trainer.fit(net, datamodule=data, ckpt_path="x.ckpt" if kind == "ckpt_path" else None)
    print("fit ended with", float(trainer.callback_metrics["accuracy"]), flush=True)
    with torch.no_grad():
        net.net[0].weight.zero_()
    trainer.validate(net, datamodule=data)
