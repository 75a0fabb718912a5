"""With the logger that ``argv[1]`` names; or what it names is done before ``fit``."""

import sys
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from small import Net, Points

from ratchet.lightning import SessionStrategy

if __name__ == "__main__":
    seed_everything(1)
    kind, net, data = sys.argv[1], Net(), Points()
    loggers: dict[str, Any] = {"board": lambda: TensorBoardLogger("logs"), "csv": lambda: CSVLogger("logs")}
    logger = loggers[kind]() if kind in loggers else False
    trainer = Trainer(strategy=SessionStrategy(), devices=2, max_epochs=4, log_every_n_steps=2, logger=logger)
    if kind == "tune":
        Tuner(trainer).lr_find(net, datamodule=data, num_training=4)
    if kind == "fit":
        trainer.fit(net, datamodule=data)
    trainer.validate(net, datamodule=data)
    trainer.fit(net, datamodule=data)
    print("fit ended with", float(trainer.callback_metrics["accuracy"]), flush=True)
    with torch.no_grad():
        net.net[0].weight.zero_()
    trainer.validate(net, datamodule=data)
