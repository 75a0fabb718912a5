"""Streams of many kinds for the tests of resumes; at module level, for worker processes. Every epoch has six batches of four."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from ratchet_worker.data.streams import TrainStream

N, SIZE = 6, 4


class Plain(Dataset[Any]):
    """Sample i: its number; with ``noise`` also draws from the process-wide generators, of a worker or of the rank."""

    def __init__(self, *, noise: bool = False) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return N * SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [float(torch.rand(())), random.random(), np.random.random()] if self.noise else []
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


class Lines(IterableDataset[Any]):
    """Numbers in an order that Python's generator makes in the first ``next``."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(N * SIZE))
        random.shuffle(order)
        yield from (torch.tensor(float(n)) for n in order)


class Position:
    """The position is a number of batches; ``DataLoader`` of the rest is made where ``__iter__`` says."""

    def __init__(self, **more: Any) -> None:
        self.at = 0
        self.more = more
        self.dataset = Plain(noise=more.pop("noise", False))

    def rest(self) -> DataLoader[Any]:
        left = range(self.at * SIZE, N * SIZE)
        return DataLoader(self.dataset, sampler=list(left), batch_size=SIZE, **self.more)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class LateLoader(Position):
    """Made in the first ``next``."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self.rest():
            self.at += 1
            yield batch
        self.at = 0


class EarlyLoader(Position):
    """Made in ``__iter__``."""

    def __iter__(self) -> Iterator[Any]:
        return self._go(iter(self.rest()))

    def _go(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.at += 1
            yield batch
        self.at = 0


class DrawnOrder(Position):
    """Draws the seed of its order when an epoch begins, and something useless whenever it starts."""

    seed = 0

    def __iter__(self) -> Iterator[Any]:
        np.random.random(), random.random()
        if self.at == 0:
            self.seed = int(torch.randint(1 << 30, ()))
        order = torch.randperm(N, generator=torch.Generator().manual_seed(self.seed))
        while self.at < N:
            self.at += 1
            yield order[self.at - 1] + (torch.rand(2) if self.dataset.noise else 0)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.seed = state["at"], state["seed"]


class OwnNoise(Position):
    """Has a generator that is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.default_rng(7)

    def __iter__(self) -> Iterator[Any]:
        while self.at < N:
            self.at += 1
            yield {"x": self.noise.random(3), "name": f"sample {self.at}"}
        self.at = 0


class Buffer(Position):
    """A shuffle buffer of tensors, drawn from by Python's generator, which the training draws from, too."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[torch.Tensor] = []
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < N:
            while len(self.buffer) < 5:
                self.buffer.append(torch.tensor([self.read]))
                self.read += 1
            self.at += 1
            yield self.buffer.pop(random.randrange(5))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "read": self.read, "buffer": self.buffer, "sizes": np.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.read, self.buffer = state["at"], state["read"], state["buffer"]


class Shuffles(IterableDataset[Any]):
    """A shuffle buffer without a position, drawn from, batch by batch, by Python's generator, which the training draws from, too.
    ``noise``: it also draws what is handed out only later."""

    def __init__(self, *, noise: bool = False) -> None:
        self.noise = noise

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[torch.Tensor] = []
        for n in range(N * SIZE):
            more = torch.rand(()) + np.random.random() if self.noise else torch.zeros(())
            buffer.append(n + more)
            if len(buffer) == 9:
                yield buffer.pop(0 if self.noise else random.randrange(9))
        yield from buffer


class Nested(Position):
    """What a ``StatefulDataLoader`` has for a state, where torchdata is not installed: tensors in nested dicts."""

    def __init__(self) -> None:
        super().__init__()
        seed = int(torch.empty((), dtype=torch.int64).random_())
        self.generator = torch.Generator().manual_seed(seed)
        self.began = self.generator.get_state()
        self.finished = False

    def __iter__(self) -> Iterator[Any]:
        torch.empty((), dtype=torch.int64).random_()  # the base seed
        skip = self.at
        if skip:
            self.generator.set_state(self.began)
        self.began = self.generator.get_state()
        order = torch.randperm(N, generator=self.generator)
        for n in range(skip, N):
            self.at += 1
            yield order[n]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        main = {"_sampler_iter_state": {"generator": self.began}, "_num_yielded": self.at, "_shared_seed": None}
        return {"_snapshot": {"_main_snapshot": main, "_worker_snapshots": {}}, "_iterator_finished": self.at == N}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        main = state["_snapshot"]["_main_snapshot"]
        self.at, self.began = main["_num_yielded"], main["_sampler_iter_state"]["generator"]


class Counts(Dataset[Any]):
    """Counts how often it was asked: no two epochs are alike, and a new process begins with 0."""

    asked = 0

    def __len__(self) -> int:
        return N * SIZE

    def __getitem__(self, index: int) -> float:
        self.asked += 1
        return float(self.asked)


class Unknown:
    """An order that nobody can repeat."""

    def __iter__(self) -> Iterator[float]:
        yield from (random.SystemRandom().random() for _ in range(N))


class UnknownAtFirst:
    """Its first batch alone is another one every time."""

    def __iter__(self) -> Iterator[float]:
        yield random.SystemRandom().random()
        yield from range(1, N)


class UnknownByState(Position):
    """The same with a position."""

    def __iter__(self) -> Iterator[float]:
        while self.at < N:
            self.at += 1
            yield random.SystemRandom().random()
        self.at = 0


def loader(**more: Any) -> DataLoader[Any]:
    return DataLoader(more.pop("dataset", None) or Plain(noise=more.pop("noise", False)), batch_size=SIZE, **more)


def stateful(**more: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Plain(noise=more.pop("noise", False)), batch_size=SIZE, **more)


def sampled(kind: Callable[[], Any], **more: Any) -> DataLoader[Any]:
    return DataLoader(Plain(), batch_size=SIZE, sampler=kind(), **more)


WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}

BY_STATE: dict[str, Callable[[], Any]] = {
    "late loader": LateLoader,
    "late loader, noise": lambda: LateLoader(noise=True),
    "late loader, workers": lambda: LateLoader(**WORKERS),
    "early loader": EarlyLoader,
    "early loader, noise": lambda: EarlyLoader(noise=True),
    "early loader, workers": lambda: EarlyLoader(**WORKERS),
    "drawn order": DrawnOrder,
    "drawn order, noise": lambda: DrawnOrder(noise=True),
    "own noise": OwnNoise,
    "buffer": Buffer,
    "nested": Nested,
}
TORCHDATA: dict[str, Callable[[], Any]] = {
    "stateful": stateful,
    "stateful, shuffled": lambda: stateful(shuffle=True),
    "stateful, shuffled, noise": lambda: stateful(shuffle=True, noise=True),
    "stateful, shuffled, generator": lambda: stateful(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "stateful, shuffled, workers": lambda: stateful(shuffle=True, **WORKERS),
    "stateful, persistent workers": lambda: stateful(shuffle=True, persistent_workers=True, **WORKERS),
}
REPEATABLE: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: loader(shuffle=True),
    "shuffled, noise": lambda: loader(shuffle=True, noise=True),
    "workers": lambda: loader(shuffle=True, noise=True, **WORKERS),
    "persistent workers": lambda: loader(shuffle=True, noise=True, persistent_workers=True, **WORKERS),
    "generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "lines": lambda: DataLoader(Lines(), batch_size=SIZE),
    "shuffle buffer": lambda: DataLoader(Shuffles(), batch_size=SIZE),
    "noise drawn ahead": lambda: DataLoader(Shuffles(noise=True), batch_size=SIZE),
    "pipe": lambda: DataLoader(IterableWrapper(range(N * SIZE)).shuffle(buffer_size=9), batch_size=SIZE),
    "weighted": lambda: sampled(lambda: WeightedRandomSampler([1.0] * (N * SIZE), N * SIZE)),
    "subset": lambda: sampled(lambda: SubsetRandomSampler(range(N * SIZE))),
    "replaced": lambda: sampled(lambda: RandomSampler(range(N * SIZE), replacement=True)),
}  # fmt: skip
EPOCHS = lambda: sampled(lambda: DistributedSampler(range(N * SIZE), 1, 0, seed=3))  # noqa: E731


def train_stream(kind: str) -> TrainStream:
    if kind == "epochs":
        return TrainStream(EPOCHS(), repeatable=True)
    if kind in REPEATABLE:
        return TrainStream(REPEATABLE[kind](), repeatable=True)
    return TrainStream((BY_STATE | TORCHDATA)[kind]())
