"""The training of ``plain.py`` as a Session: stopped, saved and resumed by Ratchet."""
# ruff: noqa: I001

from stamps import stamp

import time

import torch
from torch import nn

from ratchet_worker.session.session import Session


def main() -> None:
    stamp("torch")
    with Session() as session:
        stamp("group")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        model = session.wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        session.register(optimizer=optimizer)
        stamp("ddp")
        batch = torch.randn(32, 64)
        for _ in session.steps():
            loss = nn.functional.mse_loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stamp("step")
            time.sleep(0.01)


if __name__ == "__main__":
    main()
