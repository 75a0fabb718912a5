"""What Accelerate's ``DataLoaderShard`` does around the batches of its DataLoader, for passes that may begin within an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from accelerate.utils import send_to_device, synchronize_rng_states
from torch.utils.data import BatchSampler

from ratchet_contract.errors import UserError


def prepare_loader(loader: Any) -> None:
    """Prepare ``loader`` for its first pass. Raises ``UserError`` if, without ``even_batches`` and ``drop_last``, the batches
    cannot be divided equally among the ranks."""
    sharded = loader.batch_sampler
    if isinstance(sharded, BatchSamplerShard) and not sharded.even_batches and not sharded.drop_last:
        ranks = sharded.num_processes
        whole = sharded.batch_sampler
        if sharded.split_batches and type(whole) is BatchSampler and isinstance(whole.sampler, Sized):
            # The last rank gets a part of the last batch only if the other ranks' parts are full.
            last = len(whole.sampler) % sharded.batch_size
            uneven = 0 < last <= sharded.batch_size // ranks * (ranks - 1)
        else:
            uneven = sharded.total_length % ranks != 0
        if uneven:
            raise UserError("even_batches: False gives ranks different numbers of batches here; leave it at True")
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
        # The sampler makes its generator in its first epoch, which is too late for a resume to find it.
        sampler.generator = torch.Generator().manual_seed(sampler.initial_seed)


def begin_pass(loader: Any, *, is_resumed: bool) -> None:
    """Begin a pass over ``loader`` as Accelerate does. ``is_resumed``: the pass continues within an epoch after a resume;
    generators are then not synchronised over the ranks."""
    if loader.rng_types is not None and not is_resumed:
        synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
    loader.begin()
    loader.set_epoch(loader.iteration)


def deliver_batch(loader: Any, batch: Any, more: Callable[[], bool]) -> Any:
    """Return ``batch`` on the loader's device. Sets the loader's ``end_of_dataloader`` from ``more()``, which loads the next
    batch."""
    if loader.device is not None:
        batch = send_to_device(batch, loader.device, non_blocking=loader._non_blocking)
    loader.end_of_dataloader = not more()
    return batch
