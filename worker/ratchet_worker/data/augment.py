"""Randomness per sample, seeded by (seed, epoch, sample), so that it belongs to the sample and not to a process.

The state of a generator in a DataLoader worker is lost with the process; so is which worker loads which sample, and how far it
has read ahead. So, before a ``TrainLoader`` loads a sample, the process-wide generators of Python, NumPy and torch (CPU) are
seeded for that sample, and ``augment`` gets its own ``torch.Generator``. The result does not depend on ``num_workers``, on
prefetching, on the world size or on where a run was interrupted. ``data_generators`` handles generators that a data set creates
itself and advances from sample to sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ratchet_worker.data.order import derive_seed

Augment = Callable[[Any, torch.Generator], Any]
"""``augment(sample, generator) -> sample``. Draw from ``generator``; do not keep it."""


def sample_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """Return a new CPU generator for sample ``index`` of the data set in ``epoch``, seeded by all three arguments."""
    return torch.Generator().manual_seed(derive_seed("augment", seed, epoch, index))


def seed_process(seed: int, epoch: int, index: int) -> None:
    """Seed the process-wide generators of Python, NumPy and torch (CPU) for sample ``index`` in ``epoch``. Does not restore
    them."""
    word = derive_seed("sample", seed, epoch, index)
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word)


@contextmanager
def preserving_process_generators() -> Iterator[None]:
    """Context manager: at the end of the block, also after an exception, set the process-wide CPU generators of Python, NumPy
    and torch to their states from before it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@dataclass(frozen=True)
class SampleLoader(Dataset[Any]):
    """A map-style data set that is indexed by (epoch, index), so that the key tells a worker everything it needs. Loading a
    sample seeds the process-wide generators for that sample and leaves them seeded. ``augment`` None: samples are not
    augmented."""

    dataset: Any
    augment: Augment | None
    seed: int

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """Load the sample of ``key``, which is (epoch, index), and return it, augmented if ``augment`` is set. The process-wide
        generators are seeded for the sample first."""
        epoch, index = key
        seed_process(self.seed, epoch, index)
        sample = self.dataset[index]
        if self.augment is not None:
            sample = self.augment(sample, sample_generator(self.seed, epoch, index))
        return sample

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, keys: Sequence[tuple[int, int]], collate: Callable[[list[Any]], Any]) -> Any:
        """Load the samples of ``keys``, each (epoch, index), in this process and return them collated to one batch. Afterwards
        the process-wide CPU generators have the states from before the call."""
        with preserving_process_generators():
            return collate([self[key] for key in keys])
