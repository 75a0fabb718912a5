"""The Trainer's training data as the data of a job: any DataLoader, whose position comes back as that of a prepared one."""

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
    """What takes the batches. ``fresh``: it begins with no checkpoint, and has not begun; ``at_work``: it has; neither is it
    while a finder tries steps out."""

    @property
    def fresh(self) -> bool: ...

    @property
    def at_work(self) -> bool: ...

    @property
    def tries(self) -> bool: ...

    def restore(self) -> None: ...

    def next_step(self) -> None: ...


class Batches:
    """``loader`` as the Trainer sees it, each batch within a step. The Trainer ends an epoch by the length or its own limit, and
    asks for no batch behind it; a further pass is another epoch."""

    def __init__(self, trainer: Trainer, loader: Any, taken: Callable[[], None]) -> None:
        self._trainer, self._loader, self._taken = trainer, loader, taken
        if sized_len(loader) is None:
            raise UserError(
                f"the training data ({type(loader).__name__}) have no length, by which the Trainer ends an epoch: give the data "
                "set __len__ (samples of all its workers)"
            )
        indexed = isinstance(loader, DataLoader) and sampler_position.fits(loader)
        self.data = SamplerPosition(loader) if indexed else StreamPosition(loader)
        self._begun = False

    def follow(self, before: Batches) -> None:
        """In place of the loader ``before``, at the beginning of an epoch."""
        if before.data.position:
            before.data.end()
        self.data.begin_again({"epoch": before.data.epoch})

    def set_epoch(self, epoch: int) -> None:
        """Tell it to samplers that ask for it, as the Trainer does."""
        if isinstance(self._loader, DataLoader):
            sampler_position.set_epoch(self._loader, epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """The loader's; its position is the job's to save."""
        if name in ("_loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._trainer.fresh and not self._begun:
            self.data.begin(0)  # draws, and starts workers, where a plain loader does
            self._begun = True
        elif self._trainer.at_work and self.data.position:
            self.data.end()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        if self._trainer.tries:
            yield from self._loader
            return
        data = self.data
        self._trainer.restore()
        while not data.position or data.more():
            self._trainer.next_step()
            if not data.position and not self._begun:
                data.begin(data.epoch)
            self._begun = False
            if not data.more():
                raise UserError("the data gave no batch in a whole epoch: fewer samples than one batch needs?")
            batch = data.take()
            self._taken()
            yield batch
