"""An ordinary loop under a Session, over a DataLoader: ``script: [epochs.py]`` in the spec."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ratchet import Session


def numbers(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def main() -> None:
    session = Session()
    train = numbers(256, seed=1)
    loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
    held_back = DataLoader(numbers(64, seed=2), batch_size=32)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    model, optimizer, scheduler, loader = session.prepare(net, optimizer, scheduler, loader)
    kept = session.keep(best=0.0)
    for _ in session.epochs(5):
        for number, (x, y) in session.enumerate(loader):
            loss = nn.functional.cross_entropy(model(x.to(session.device)), y.to(session.device))
            loss.backward()
            if (number + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            session.log({"loss": loss})
        model.eval()
        with torch.no_grad():
            right = sum(int((net(x.to(session.device)).argmax(1).cpu() == y).sum()) for x, y in held_back)
        model.train()
        kept.best = max(kept.best, right / 64)
        session.log({"accuracy": right / 64, "best": kept.best})
        scheduler.step()


if __name__ == "__main__":
    main()
