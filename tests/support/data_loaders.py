"""DataLoaders of many kinds for the tests of their positions; at module level, for worker processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

COUNT = 22


class Drawn(Dataset[Any]):
    """Sample i: its number, and draws from all generators. ``loaded``: how many samples were asked for."""

    def __init__(self) -> None:
        self.loaded = 0
        self.own = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        drawn = [float(torch.rand(())), random.random(), np.random.random()]
        own = float(torch.rand((), generator=self.own))
        return torch.tensor([float(index), *drawn, own], dtype=torch.float64)


class Passes(Sampler[list[int]]):
    """Another number of batches in each pass, which it counts."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        order = np.random.RandomState(self.passes).permutation(COUNT).tolist()
        yield from (order[n : n + 3] for n in range(0, COUNT - 3 * (self.passes % 2), 3))


class Now(Sampler[int]):
    """Draws each index when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        yield from (random.randrange(COUNT) for _ in range(COUNT))


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = Drawn()
        yield from (samples[n] for n in random.sample(range(COUNT), COUNT))


SAMPLERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "shuffle": lambda **more: DataLoader(Drawn(), 4, shuffle=True, **more),
    "generator": lambda **more: DataLoader(Drawn(), 4, True, generator=torch.Generator().manual_seed(5), **more),
    "weighted": lambda **more: DataLoader(
        Drawn(), 4, sampler=WeightedRandomSampler([1.0] * 11 + [3.0] * 11, COUNT), drop_last=True, **more
    ),
    "distributed": lambda **more: DataLoader(Drawn(), 2, sampler=DistributedSampler(Drawn(), 2, 1), **more),
    "batch sampler": lambda **more: DataLoader(
        Drawn(), batch_sampler=BatchSampler(SubsetRandomSampler(range(20)), 3, False), **more
    ),
    "passes": lambda **more: DataLoader(Drawn(), batch_sampler=Passes(), **more),
    "alone": lambda **more: DataLoader(Drawn(), batch_size=None, shuffle=True, **more),
}
