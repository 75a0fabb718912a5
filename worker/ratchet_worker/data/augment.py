"""Randomness per sample, seeded by seed, epoch and sample, so that it depends neither on the number of workers or ranks nor on
interruptions."""

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
    """Seed the process-wide generators of Python, NumPy and torch (CPU) for sample ``index`` in ``epoch``."""
    word = derive_seed("sample", seed, epoch, index)
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word)


@contextmanager
def preserving_process_generators() -> Iterator[None]:
    """Context manager: restore the process-wide CPU generators of Python, NumPy and torch at the end of the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@dataclass(frozen=True)
class SampleLoader(Dataset[Any]):
    """A map-style data set that is indexed by (epoch, index). Loading a sample seeds the process-wide generators for it."""

    dataset: Any
    augment: Augment | None
    seed: int

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """Return the sample of ``key``, which is (epoch, index), augmented if ``augment`` is set. Seeds the process-wide
        generators first."""
        epoch, index = key
        seed_process(self.seed, epoch, index)
        sample = self.dataset[index]
        if self.augment is not None:
            sample = self.augment(sample, sample_generator(self.seed, epoch, index))
        return sample

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, keys: Sequence[tuple[int, int]], collate: Callable[[list[Any]], Any]) -> Any:
        """Load the samples of ``keys``, each (epoch, index), in this process and return them collated. Restores the process-wide
        CPU generators."""
        with preserving_process_generators():
            return collate([self[key] for key in keys])
