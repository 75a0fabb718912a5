"""A small net on a stream of the kind ``argv[1]``. Where ``argv[2]`` is ``killed``, the first attempt dies behind the checkpoint
of 14 steps."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from ratchet_worker.data.streams import TrainStream
from ratchet_worker.session.session import Session

KILL, EVERY, STEPS = 16, 7, 24  # ten batches in an epoch


class Samples(Dataset[Any]):
    """Sample i: draws with ``noise`` from the process-wide generator of torch."""

    def __init__(self, *, noise: bool = False) -> None:
        self.inputs = torch.randn(40, 8, generator=torch.Generator().manual_seed(3))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs[index]
        return x + 0.1 * torch.randn(8) if self.noise else x, (x.sum() > 0).long()


class Buffered(IterableDataset[Any]):
    """A shuffle buffer that draws from Python's generator, batch by batch, and noise from torch's, ahead of what it gives."""

    def __iter__(self) -> Iterator[Any]:
        samples, buffer = Samples(noise=True), list[Any]()
        for n in range(len(samples)):
            buffer.append(samples[n])
            if len(buffer) == 12:
                yield buffer.pop(random.randrange(12))
        yield from buffer


class Inner(IterableDataset[Any]):
    """A data set over a loader of its own, whose position is its position."""

    def __init__(self) -> None:
        self.loader = stateful(Samples(), batch_size=None, shuffle=True)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def stateful(data: Any, **more: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, **{"batch_size": 4, **more})


KINDS: dict[str, Callable[[], TrainStream]] = {
    "stateful": lambda: TrainStream(stateful(Samples(), shuffle=True, num_workers=2)),
    "nested": lambda: TrainStream(stateful(Inner())),
    "nested, workers": lambda: TrainStream(stateful(Inner(), num_workers=1)),
    "buffered": lambda: TrainStream(DataLoader(Buffered(), batch_size=4), repeatable=True),
    "noise": lambda: TrainStream(DataLoader(Samples(noise=True), batch_size=4, shuffle=True), repeatable=True),
    "pipe": lambda: TrainStream(
        DataLoader(IterableWrapper(Samples()).shuffle(buffer_size=12), batch_size=4, num_workers=1), repeatable=True
    ),
}  # fmt: skip


def die(session: Session, step: int) -> None:
    launch = session._runtime.launch
    if sys.argv[2] == "killed" and launch.attempt == 1 and step == KILL and session.rank == 1:
        manifest = Path(launch.job_root, "checkpoints", "step-000000000014.a0001", "MANIFEST.json")
        end = time.monotonic() + 60
        while not manifest.exists() and time.monotonic() < end:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    with Session() as session:
        torch.manual_seed(session.seed + session.rank)
        session.register(data=KINDS[sys.argv[1]]())
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
        model = session.wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        session.register(optimizer=optimizer)
        batches = session.batches()
        for step in session.steps(STEPS):
            die(session, step)
            x, y = next(batches)
            loss = cross_entropy(model(x + 0.01 * random.random()), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
