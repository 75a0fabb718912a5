"""The DataLoader of a Trainer as the job's data: its own batches, in its own order, from where the job's data stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from accelerate.utils import send_to_device, synchronize_rng_states
from torch.utils.data import DataLoader

from ratchet_contract.errors import UserError
from ratchet_worker.data import sampler_position
from ratchet_worker.data.sampler_position import SamplerPosition


class TrainingBatches:
    """``loader``, with a ``position`` that a checkpoint has. A pass begins with an epoch, and behind a resume within one. Length
    and attributes are the loader's. Raises ``UserError`` for a loader whose position could not be put back."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._ahead = type(loader) is DataLoaderShard
        base = loader.base_dataloader if self._ahead else loader
        if not isinstance(base, DataLoader) or not sampler_position.fits(base):
            raise UserError(
                f"train_dataset: the Trainer's {type(loader).__name__} has no position that a resume could put back: give data "
                "with a length and __getitem__, and of get_train_dataloader a torch DataLoader over such"
            )
        _make_generators(base)
        self.position = SamplerPosition(base, ahead=self._ahead)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch, or the next one. Nothing is drawn before the first batch is asked for."""
        position = self.position
        if self._ahead:
            self._begin_shard(within=position.position > 0)
        if not position.position:
            position.begin(position.epoch)
        while position.more():
            batch = position.take()
            if self._ahead:
                batch = self._of_shard(batch)
            if position.position < len(self):
                yield batch
            else:  # the Trainer asks for no more than there are
                position.end()
                yield batch
                return

    def _begin_shard(self, *, within: bool) -> None:
        """As ``DataLoaderShard.__iter__``."""
        loader = self._loader
        if loader.rng_types is not None and not within:
            synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
        loader.begin()
        loader.set_epoch(loader.iteration)

    def _of_shard(self, batch: Any) -> Any:
        loader = self._loader
        if loader.device is not None:
            batch = send_to_device(batch, loader.device, non_blocking=loader._non_blocking)
        loader.end_of_dataloader = not self.position.more()
        return batch


def _make_generators(loader: Any) -> None:
    """Accelerate's sampler makes its generator with its first epoch, which is too late for a resume to find it."""
    for sampler in sampler_position.samplers(loader):
        if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(sampler.initial_seed)
