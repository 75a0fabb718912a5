"""The order of the data as a pure function of (seed, epoch, position). With shuffling, samples are sorted by words of a Philox
stream keyed by seed and epoch. Samples that do not fill a global batch are dropped."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ratchet_contract.errors import UserError

ORDER_VERSION: Final = 1
BatchIs = Literal["per_rank", "global"]


def derive_seed(purpose: str, *parts: int, bits: int = 64) -> int:
    """Return an integer of ``bits`` bits (<= 256) from SHA-256 of ``ratchet/<purpose>/<part>/...``; the same on every machine."""
    text = "/".join(["ratchet", purpose, *(str(int(p)) for p in parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") >> (256 - bits)


def epoch_order(length: int, seed: int, epoch: int, *, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """Return the sample indices 0 .. length-1 in the order of ``epoch``, int64 of shape (length,)."""
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    key = derive_seed("order", ORDER_VERSION, seed, epoch, bits=128)
    # NumPy guarantees the raw stream across versions (NEP 19), and sorting integers has one answer. torch.randperm and
    # Generator.permutation have no such guarantee.
    words = np.random.Philox(key=key).random_raw(length)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


@dataclass(frozen=True)
class BatchRule:
    """Cuts the order into batches for one rank. ``length``: samples in the data set. Raises ``UserError`` for invalid
    arguments."""

    length: int
    batch_size: int
    batch_is: BatchIs
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.batch_is not in ("per_rank", "global"):
            raise UserError(f"batch_is must be 'per_rank' or 'global', not {self.batch_is!r}")
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank {self.rank} is not in a world of {self.world_size}")
        if self.batch_size < 1:
            raise UserError(f"batch_size must be at least 1, not {self.batch_size}")
        # DDP averages ranks, not samples, so uneven parts would be weighted wrongly.
        if self.batch_is == "global" and self.batch_size % self.world_size:
            raise UserError(
                f"a global batch of {self.batch_size} does not divide evenly over {self.world_size} ranks; choose a multiple "
                f"of {self.world_size}, or batch_is='per_rank'"
            )
        if self.length < self.global_batch:
            raise UserError(
                f"{self.length} samples do not fill one global batch of {self.global_batch}; use a smaller batch_size"
            )

    @property
    def per_rank(self) -> int:
        """Samples of one rank's batch."""
        return self.batch_size if self.batch_is == "per_rank" else self.batch_size // self.world_size

    @property
    def global_batch(self) -> int:
        """Samples of one step over all ranks."""
        return self.per_rank * self.world_size

    @property
    def batches_per_epoch(self) -> int:
        """The number of whole global batches in an epoch."""
        return self.length // self.global_batch

    def batches_left(self, position: int) -> int:
        """The number of whole global batches from ``position`` to the end of the epoch."""
        return max(0, self.length - position) // self.global_batch

    def start(self, position: int) -> int:
        """Return where this rank's part of the global batch at ``position`` begins, as an index into the epoch's order."""
        return position + self.rank * self.per_rank


def shard(length: int, rank: int, world_size: int) -> range:
    """Return this rank's part of ``length`` items, as indices; parts differ in size by at most 1. In an evaluation, sum counts,
    not means, over ranks."""
    return range(length * rank // world_size, length * (rank + 1) // world_size)
