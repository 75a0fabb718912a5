"""The Trainer's training data as the job's data: any loader with a length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader

from ratchet_contract.errors import UserError
from ratchet_worker.data import sampler_position
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.data.stream_position import StreamPosition


class Trainer(Protocol):
    """The consumer of the batches. ``is_fresh``: it starts without a checkpoint, and has not begun to train. ``has_begun``: its
    state is restored, or it has begun without a checkpoint. ``is_trying_out``: it does trial steps."""

    @property
    def is_fresh(self) -> bool: ...

    @property
    def has_begun(self) -> bool: ...

    @property
    def is_trying_out(self) -> bool: ...

    def restore(self) -> None: ...

    def next_step(self) -> None: ...


class Batches:
    """The iterable that replaces the Trainer's training data ``loader`` and begins the job's steps. Raises ``UserError`` for a
    loader without a length."""

    def __init__(self, trainer: Trainer, loader: Any, on_batch: Callable[[], None]) -> None:
        self._trainer, self._loader, self._on_batch = trainer, loader, on_batch
        if sized_len(loader) is None:
            raise UserError(
                f"the training data ({type(loader).__name__}) have no length, by which the Trainer ends an epoch: give the data "
                "set __len__ (samples of all its workers)"
            )
        indexed = isinstance(loader, DataLoader) and sampler_position.is_supported(loader)
        self.data = SamplerPosition(loader) if indexed else StreamPosition(loader)
        self._begun = False

    def replace_loader(self, before: Batches) -> None:
        """Take the place of ``before``, the Trainer's earlier loader, at the beginning of the epoch that ``before`` would begin
        next."""
        if before.data.position:
            before.data.end()
        self.data.restart_epoch({"epoch": before.data.epoch})

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch on samplers that need it, as the Trainer does."""
        if isinstance(self._loader, DataLoader):
            sampler_position.set_epoch(self._loader, epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """The loader's attributes, except its state: the job saves the position."""
        if name in ("_loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch. If the Trainer has left a pass early, its epoch ends here, and the
        iterator is over the next one."""
        if self._trainer.is_fresh and not self._begun:
            self.data.begin(0)  # draws, and starts workers, where a plain loader does
            self._begun = True
        elif self._trainer.has_begun and self.data.position:
            self.data.end()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        """Yield the rest of the epoch, each batch within a step; in trial steps, the loader's batches. Raises ``UserError`` for
        an epoch without batches, and ``Stopped``."""
        if self._trainer.is_trying_out:
            yield from self._loader
            return
        data = self.data
        self._trainer.restore()
        while not data.position or data.has_more():
            self._trainer.next_step()
            if not data.position and not self._begun:
                data.begin(data.epoch)
            self._begun = False
            if not data.has_more():
                raise UserError("the data gave no batch in a whole epoch: fewer samples than one batch needs?")
            batch = data.take()
            self._on_batch()
            yield batch
