"""Small data sets for the data tests; at module level, so that freshly started worker processes can import them."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch


class Noisy:
    """Sample i: its index, and draws from the three process-wide generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(
            [float(index), random.random(), np.random.random(), float(torch.rand(()))], dtype=torch.float64
        )


class Slow:
    """Sample i after ``seconds``."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


def jitter(sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Appends one draw from the sample's own generator."""
    return torch.cat([sample, torch.rand(1, generator=generator, dtype=torch.float64)])


class Counting:
    """A stream of 0, 1, 2 ... with a position."""

    def __init__(self, length: int) -> None:
        self.length, self.next = length, 0

    def __iter__(self) -> Any:
        while self.next < self.length:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Stale(Counting):
    """The classic fault: the position moves on only when the next batch is asked for."""

    def __iter__(self) -> Any:
        while self.next < self.length:
            yield self.next
            self.next += 1
