"""Loops that are not quite ordinary: ``python variants.py KIND [EPOCH.BATCH]``, where rank 1 of the first attempt dies.

``bar``: ``enumerate`` around a progress bar. ``early``: a stream, passes that are broken off, others that only look, a checkpoint
between two epochs, and a training that ends before its last epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from train import Lines, Samples, die

from ratchet import Session


def bar(batches: Iterable[Any]) -> Iterator[Any]:
    yield from batches


def main() -> None:
    kind = sys.argv[1]
    sys.argv.insert(2, "")  # where ``die`` does not look
    with Session() as session:
        torch.manual_seed(1 + session.rank)
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        data: Any = Lines() if kind == "early" else Samples(28)
        loader = DataLoader(data, 4, generator=torch.Generator().manual_seed(session.rank))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer, prepared, scheduler, model = session.prepare(optimizer, loader, scheduler, net)
        assert prepared.dataset is data and prepared.batch_size == 4
        for epoch in session.epochs(9):
            scheduler.step()  # taken back where the epoch is resumed
            numbers: Any = enumerate(bar(prepared)) if kind == "bar" else session.enumerate(bar(prepared))
            for n, (x, y) in numbers:
                die(f"{epoch}.{n}", session)
                cross_entropy(model(x), y).backward()
                if n % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                session.log({"number": float(n)})
                if kind == "early" and (epoch, n) == (0, 4):
                    break
            if kind == "early":
                with torch.no_grad():
                    session.log({"loss": sum(float(cross_entropy(net(x), y)) for x, y in prepared)})
                if epoch == 1:
                    assert session.checkpoint()
            if epoch == 3:
                break


if __name__ == "__main__":
    main()
