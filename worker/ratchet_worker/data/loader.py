"""Map-style training data whose position is restored exactly, within an epoch too. ``endless`` iterates over any data epoch after
epoch."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, default_collate

from ratchet_contract.errors import UserError
from ratchet_worker.data import dataloader_workers
from ratchet_worker.data.augment import Augment, SampleLoader
from ratchet_worker.data.data_generators import OwnGenerators
from ratchet_worker.data.digest import dataset_digest
from ratchet_worker.data.order import ORDER_VERSION, BatchIs, BatchRule, derive_seed, epoch_order

Key = tuple[int, int]


class _Cursor:
    """One rank's position in the data: ``epoch``, and ``position``, the number of samples of this epoch that all ranks together
    have used. Iterating yields the keys of the epoch's remaining batches."""

    def __init__(self, rule: BatchRule, seed: int, shuffle: bool) -> None:
        self.rule, self.seed, self.shuffle = rule, seed, shuffle
        self.epoch = self.position = 0

    def move_to(self, epoch: int, position: int) -> None:
        """Set epoch and position. A position with no whole global batch left becomes the beginning of the next epoch."""
        self.epoch, self.position = epoch, position
        if self.rule.batches_left(position) == 0:
            self.epoch, self.position = epoch + 1, 0

    def advance(self) -> None:
        """Move the position past one batch of all ranks. Called for each batch, just before it is yielded."""
        self.move_to(self.epoch, self.position + self.rule.global_batch)

    def __len__(self) -> int:
        return self.rule.batches_left(self.position)

    def __iter__(self) -> Iterator[list[Key]]:
        # Epoch and position are bound now: with prefetching, the keys are read ahead of the position.
        return self._keys(self.epoch, self.position, len(self))

    def _keys(self, epoch: int, position: int, count: int) -> Iterator[list[Key]]:
        """Yield the keys of this rank's next ``count`` batches from ``position`` in ``epoch``."""
        order = epoch_order(self.rule.length, self.seed, epoch, shuffle=self.shuffle)
        for n in range(count):
            start = self.rule.start(position + n * self.rule.global_batch)
            yield [(epoch, index) for index in order[start : start + self.rule.per_rank].tolist()]


class TrainLoader:
    """This rank's batches of a map-style data set; implements ``TrainData``.

    ``dataset``: an object with ``__len__`` and ``__getitem__(index)``, the same on all ranks. ``batch_size``: samples per rank
    (``batch_is="per_rank"``) or per step of the whole group (``"global"``, which stays the same when the world size changes).
    ``seed`` and the epoch determine the order; ``shuffle=False``: the samples come in the order of their indices. ``rank`` and
    ``world_size``: those of the Session or the ``TaskContext``. ``augment(sample, generator)`` draws from a generator seeded by
    (seed, epoch, sample); the process-wide generators of ``random``, NumPy and torch (CPU) are seeded by the same three values
    before each sample is loaded. ``num_workers``, ``prefetch_factor`` and ``collate_fn`` are as in torch's ``DataLoader``. With
    workers, generators that ``dataset``, ``augment`` or ``collate_fn`` hold themselves make ``exact`` False.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        batch_is: BatchIs = "per_rank",
        shuffle: bool = True,
        augment: Augment | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Raises ``UserError`` for invalid arguments, and if the data set does not fill one global batch."""
        if num_workers < 0 or (prefetch_factor is not None and (num_workers == 0 or prefetch_factor < 1)):
            raise UserError("num_workers is >= 0; prefetch_factor is >= 1 and needs num_workers > 0")
        rule = BatchRule(len(dataset), batch_size, batch_is, rank, world_size)
        self._cursor = _Cursor(rule, seed, shuffle)
        self._samples = SampleLoader(dataset, augment, seed)
        self._num_workers, self._prefetch_factor = num_workers, prefetch_factor
        self._collate: Callable[[list[Any]], Any] = collate_fn or default_collate
        self.own_generators = OwnGenerators({"dataset": dataset, "augment": augment, "collate_fn": collate_fn})
        self._run = 0
        self._loader: DataLoader[Any] | None = None
        self._processes: list[BaseProcess] = []
        self._finalizer = weakref.finalize(self, dataloader_workers.kill_workers, self._processes, os.getpid())

    @property
    def exact(self) -> bool:
        """True unless ``inexact_reason`` has a reason."""
        return self.inexact_reason is None

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report if there are workers and ``dataset``, ``augment`` or ``collate_fn`` holds a generator;
        else None."""
        if self._num_workers == 0 or not (found := sorted(self.own_generators.find())):
            return None
        return (
            f"{', '.join(found)}: a generator of its own, whose state is lost with the DataLoader workers that draw from "
            "it: draw from torch's, numpy's or Python's, which are seeded for every sample, or use num_workers=0"
        )

    @property
    def epoch(self) -> int:
        """Number of completed epochs; it increases when an epoch's last batch is yielded."""
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """Number of samples that all ranks together have consumed in this epoch."""
        return self._cursor.position

    @property
    def batch_is(self) -> BatchIs:
        """The meaning of ``batch_size``: ``per_rank`` or ``global``."""
        return self._cursor.rule.batch_is

    @property
    def steps_per_epoch(self) -> int:
        """Number of this rank's batches in one epoch, equal on all ranks. Samples at the end that do not fill a global batch are
        dropped."""
        return self._cursor.rule.batches_per_epoch

    def __len__(self) -> int:
        """Return ``steps_per_epoch``."""
        return self.steps_per_epoch

    def data_digest(self) -> str | None:
        """Return ``dataset.digest()``, which identifies the samples, or None if the data set has no such method."""
        return dataset_digest(self._samples.dataset)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches from the position to the end of the epoch; it ends an earlier iterator."""
        self._run += 1
        return self._batches(self._run)

    def _batches(self, run: int) -> Iterator[Any]:
        """Yield the batches from the position on, and move the position before each. ``run``: the number of this iterator."""
        if run != self._run:
            return
        for batch in self._fetch():
            if run != self._run:  # a later iter(), load_state_dict() or close() has ended this iterator
                return
            self._cursor.advance()
            yield batch

    def _fetch(self) -> Iterator[Any]:
        """Return an iterator over the epoch's remaining batches, and start the workers if needed. Starting them raises
        ``UserError`` outside the main thread, and for data that cannot be pickled."""
        if self._num_workers == 0:
            return (self._samples.batch(keys, self._collate) for keys in self._cursor)
        if self._loader is not None:
            return iter(self._loader)
        self._loader = DataLoader(
            self._samples,
            batch_sampler=self._cursor,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            collate_fn=self._collate,
            persistent_workers=True,
            multiprocessing_context=dataloader_workers.START_METHOD,
            worker_init_fn=partial(dataloader_workers.init_worker, os.getpid()),
            # Without its own generator it draws from the rank's default generator at every iter().
            generator=torch.Generator().manual_seed(derive_seed("loader", self._cursor.seed)),
        )
        try:
            with warnings.catch_warnings(), dataloader_workers.starting_workers(self._processes):
                warnings.filterwarnings("ignore", "Got pickle error")  # the error below is clearer
                return iter(self._loader)
        except (PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise UserError(
                f"num_workers > 0 starts fresh processes, so the data set, augment and collate_fn must be importable and "
                f"made of plain data ({error}); move them to the top of a module, or use num_workers=0"
            ) from error

    def close(self) -> None:
        """End the iteration and kill the workers, without waiting for their batches. The next ``iter()`` starts new workers."""
        self._run += 1
        dataloader_workers.kill_workers(self._processes, os.getpid())
        self._loader = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded, and the values that determine the order, fit for JSON."""
        rule = self._cursor.rule
        return {
            "kind": "map",
            "order_version": ORDER_VERSION,
            "seed": self._cursor.seed,
            "shuffle": self._cursor.shuffle,
            "length": rule.length,
            "world_size": rule.world_size,
            "batch_size": rule.batch_size,
            "batch_is": rule.batch_is,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the sample recorded in ``state``, and end the current iterator. Raises ``ValueError``, and changes nothing,
        if ``state`` does not fit, as for another order, length of the data set or number of ranks."""
        recorded = state.get("world_size")
        if recorded != self._cursor.rule.world_size:
            raise ValueError(
                f"the data position was recorded with {recorded} ranks, this group has {self._cursor.rule.world_size}: "
                "continue through load_resized"
            )
        self._load(state)

    def load_resized(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue at the first unused sample of the global order, after the number of ranks has changed. ``states``: the states
        of the old ranks, in rank order. Raises ``ValueError``, and changes nothing, if they differ from each other or do not fit
        this loader."""
        if not states:
            raise ValueError("there is no recorded data position to continue from")
        if any(other != states[0] for other in states):
            raise ValueError("the recorded ranks were at different data positions; they do not belong to one step")
        self._load(states[0])

    def _load(self, state: dict[str, Any]) -> None:
        """Move to the position in ``state``, and end the current iterator. Raises ``ValueError`` if ``state`` does not fit."""
        mine = self.state_dict()
        for key in ("kind", "order_version", "seed", "shuffle", "length"):
            if state.get(key) != mine[key]:
                raise ValueError(
                    f"cannot continue the data order: {key} was {state.get(key)!r}, now it is {mine[key]!r}; restore the old "
                    "value, or start the data from the beginning"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if not (
            isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 and 0 <= position <= mine["length"]
        ):
            raise ValueError(f"not a data position: epoch {epoch!r}, position {position!r} of {mine['length']} samples")
        self._run += 1
        self._cursor.move_to(epoch, position)


Item = TypeVar("Item")


def endless(data: Iterable[Item], on_batch: Callable[[], None], *, restored: bool = False) -> Iterator[Item]:
    """Yield batches of ``data``, epoch after epoch, calling ``on_batch`` before each. Raises ``UserError`` for an epoch without
    batches. ``restored``: the position was restored, so that the first epoch may have no batches left."""
    while True:
        empty = True
        for batch in data:
            empty = False
            on_batch()
            yield batch
        if empty and not restored:
            raise UserError("the data gave no batch in a whole epoch: fewer samples than one global batch needs?")
        restored = False
