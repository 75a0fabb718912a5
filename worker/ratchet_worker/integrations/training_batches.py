"""A Trainer's DataLoader as the job's data: its own batches, from the position of the job's data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader

from ratchet_contract.errors import UserError
from ratchet_worker.data import sampler_position
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.integrations import data_loader_shard


class TrainingBatches:
    """The batches of ``loader``, with a ``position`` that checkpoints save. Raises ``UserError`` for a loader that a job cannot
    use."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._ahead = type(loader) is DataLoaderShard
        base = loader.base_dataloader if self._ahead else loader
        if not isinstance(base, DataLoader) or not sampler_position.is_supported(base):
            raise UserError(
                f"train_dataset: the Trainer's {type(loader).__name__} has no position that a resume can restore: use data "
                "with a length and __getitem__, and return a torch DataLoader over them from get_train_dataloader"
            )
        if self._ahead:
            data_loader_shard.prepare_loader(loader)
        self.position = SamplerPosition(base, ahead=self._ahead)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the job's position to the end of the epoch."""
        position = self.position
        if self._ahead:
            data_loader_shard.begin_pass(self._loader, is_resumed=position.position > 0)
        if not position.position:
            position.begin(position.epoch)
        while position.has_more():
            batch = position.take()
            if self._ahead:
                batch = data_loader_shard.deliver_batch(self._loader, batch, position.has_more)
            if position.position < len(self):
                yield batch
            else:  # the Trainer requests no more batches than the length
                position.end()
                yield batch
                return
