"""A training script as one writes it for ``torchrun --nproc-per-node 2 plain.py``; it knows nothing of Ratchet."""
# ruff: noqa: I001

from stamps import stamp

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    stamp("torch")
    dist.init_process_group("gloo")
    stamp("group")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    stamp("ddp")
    batch = torch.randn(32, 64)
    while True:
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stamp("step")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
