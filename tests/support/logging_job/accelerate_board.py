"""Accelerate with ``log_with="tensorboard"``: ``accelerate_board.py WAY PLACE...``. Killed at each PLACE, ``ATTEMPT:STEP``.
With the WAY ``plain`` the tracker is Accelerate's own."""

from __future__ import annotations

import os
import signal
import sys

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ratchet.accelerate import Accelerator

if __name__ == "__main__":
    torch.manual_seed(1)
    kind = "mlflow" if sys.argv[1].startswith("mlflow") else "tensorboard"
    accelerator = Accelerator(log_with=kind, project_dir="logs")
    if sys.argv[1].endswith("plain"):
        accelerate.Accelerator.init_trackers(accelerator, "run", config={"lr": 0.1})
    else:
        accelerator.init_trackers("run", config={"lr": 0.1})
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    points = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(points, 4, shuffle=True)
    )
    step = 0
    for epoch in accelerator.epochs(4):
        for (x,) in loader:
            loss = net(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step = accelerator.session.step
            accelerator.log({"loss": loss.item(), "both": {"loss": loss.item(), "double": 2 * loss.item()}}, step=step)
            if kind == "mlflow":
                accelerator.log({"without step": loss.item()})
            if f"{os.environ['RATCHET_ATTEMPT']}:{step}" in sys.argv[2:]:
                os.kill(os.getpid(), signal.SIGKILL)
        accelerator.log({"of epoch": float(epoch)}, step=epoch)
    accelerator.end_training()
