"""An ordinary training loop: ``python train.py KIND OUT PLACE ...``.

Under torch alone (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun gives them) it is what many have; under Ratchet a few
lines differ. Attempt n of a job dies at the n-th PLACE: ``EPOCH.BATCH`` in the body of that batch's step, or ``EPOCH.end``
between this epoch and the next.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

EPOCHS = 4
RANK = int(os.environ["RANK"])


class Samples(Dataset[Any]):
    """``noise``: drawn from all of the process-wide generators, of a worker or of the rank, and from one of its own."""

    def __init__(self, count: int, *, noise: bool = False) -> None:
        self.inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))
        self.noise, self.own = noise, np.random.default_rng(RANK)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs[index]
        label = (x.sum() > 0).long()
        if self.noise:
            x = x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * np.random.random() + 0.1 * self.own.random()
        return x.float(), label


class Buckets(Sampler[list[int]]):
    """Batches of near numbers in an order that numpy's generator gives, of another length in each epoch."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        batches = [list(range(n, n + 3)) for n in range(RANK * 3, 36, 6)]
        for n in np.random.permutation(len(batches)):
            yield batches[n]
        for _ in range(self.passes % 2):
            yield [random.randrange(36) for _ in range(3)]


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = Samples(28, noise=True)
        yield from (samples[n] for n in random.sample(range(28), 28))


def make_loader(kind: str) -> DataLoader[Any]:
    if kind == "distributed":
        data = Samples(44)
        return DataLoader(data, 4, sampler=DistributedSampler(data, int(os.environ["WORLD_SIZE"]), RANK))
    if kind == "weighted":
        weights = [1.0] * 15 + [3.0] * 13
        return DataLoader(Samples(28, noise=True), 4, sampler=WeightedRandomSampler(weights, 28))
    if kind == "buckets":
        return DataLoader(Samples(36, noise=True), batch_sampler=Buckets())
    if kind == "lines":
        return DataLoader(Lines(), 4)
    data, persistent = Samples(28, noise=True), kind == "persistent"
    generator = torch.Generator().manual_seed(RANK)
    return DataLoader(data, 4, shuffle=True, generator=generator, num_workers=2, persistent_workers=persistent)


def die(place: str, session: Any) -> None:
    """Once, when the checkpoint of the step before this one is there, if one was due."""
    runtime, places = session._runtime, sys.argv[3:]
    number = runtime.launch.attempt
    if RANK != 1 or number > len(places) or places[number - 1] != place:
        return
    due = runtime.step - runtime.step % runtime.launch.spec.checkpoint.every_steps
    end = time.monotonic() + 60
    while due and not list(Path(runtime.launch.job_root, "checkpoints").glob(f"step-{due:012d}.*/MANIFEST.json")):
        assert time.monotonic() < end, f"step {due} was not saved"
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    kind, out = sys.argv[1], Path(sys.argv[2])
    session: Any = None
    if "RATCHET_JOB_ID" in os.environ:
        from ratchet import Session

        session = Session()
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
    torch.manual_seed(RANK), np.random.seed(RANK), random.seed(RANK)
    model: Any = net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    loader: Any = make_loader(kind)
    if session is None:
        model = DistributedDataParallel(net)
    else:
        loader, model, scheduler, optimizer = session.prepare(loader, model, scheduler, optimizer)
        if kind == "weighted":  # the others leave it to epochs()
            session.restore()
    torch.rand(2)  # drawn again by every attempt
    accumulate = 2 if kind == "weighted" else 1
    test = DataLoader(Samples(12, noise=True), 6, shuffle=True)
    for epoch in range(EPOCHS) if session is None else session.epochs(EPOCHS):
        torch.rand(epoch)  # drawn again where an epoch is resumed
        if kind == "distributed":
            loader.sampler.set_epoch(epoch)
        for n, (x, y) in enumerate(loader):
            if session is not None:
                die(f"{epoch}.{n}", session)
            last = (n + 1) % accumulate == 0
            with nullcontext() if last else model.no_sync():
                (cross_entropy(model(x), y) / accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss = torch.stack([cross_entropy(model(x), y) for x, y in test]).mean()
        dist.all_reduce(loss)
        model.train()
        if session is not None:
            die(f"{epoch}.end", session)
            session.log({"test_loss": loss})
        scheduler.step(loss)
    save_file({**net.state_dict(), "drawn": torch.rand(3)}, out / f"{RANK}.safetensors")


if __name__ == "__main__":
    main()
