"""The DataLoader of a Trainer as the job's data: its own batches, in its own order, from where the job's data stand."""

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
    """``loader``, with a ``position`` that a checkpoint has. A pass begins with an epoch, and after a resume within one. Length
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
        if self._ahead:
            data_loader_shard.make_ready(loader)
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
            data_loader_shard.begin(self._loader, within=position.position > 0)
        if not position.position:
            position.begin(position.epoch)
        while position.more():
            batch = position.take()
            if self._ahead:
                batch = data_loader_shard.handed_out(self._loader, batch, position.more)
            if position.position < len(self):
                yield batch
            else:  # the Trainer asks for no more than there are
                position.end()
                yield batch
                return
