"""The position in a DataLoader over a map-style data set. A resume reads the used indices from the sampler again, without loading
their batches."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import torch
import xxhash
from torch.utils.data import DataLoader

from ratchet_worker.data import dataloader_workers, generator_positions
from ratchet_worker.data.batch_digest import BatchDigest
from ratchet_worker.data.data_generators import OwnGenerators
from ratchet_worker.data.digest import dataset_digest
from ratchet_worker.data.loader_position import LoaderPosition
from ratchet_worker.data.worker_generators import WorkerGenerators

_PLAIN: Final = (type(None), bool, int, float, str)
Attributes = list[dict[str, Any]]
"""Plain attributes of each sampler."""


def is_supported(loader: DataLoader[Any]) -> bool:
    """True for a DataLoader over a map-style data set with torch's ``__iter__`` and no ``state_dict``; with workers, only if it
    has a batch sampler."""
    plain = type(loader).__iter__ is DataLoader.__iter__ and not hasattr(loader, "state_dict")
    alone = loader.batch_sampler is None and loader.num_workers > 0
    return plain and not isinstance(loader.dataset, torch.utils.data.IterableDataset) and not alone


class SamplerPosition(LoaderPosition):
    """This rank's batches of ``loader``; implements ``TrainData``. Call ``begin``, then ``take`` while ``has_more``, then
    ``end``. ``ahead``: ``has_more`` also loads the next batch."""

    def __init__(self, loader: DataLoader[Any], *, ahead: bool = False) -> None:
        super().__init__(loader)
        self.epoch = self.position = 0
        self._kind = "sampler, one ahead" if ahead else "sampler"
        self._loads_ahead, self._ahead = ahead, deque[Any]()
        self._before: generator_positions.Point | None = (
            None  # states of the generators before the batch ahead was loaded, in this process
        )
        self._reload_ahead = False  # the batch ahead must be loaded again after a resume
        self._own: dict[str, Any] = {}  # generators of the loader, as last found
        roots = {
            name: getattr(loader, name) for name in ("dataset", "collate_fn", "sampler", "batch_sampler", "generator")
        }
        self.own_generators = OwnGenerators(roots)
        self._indices = _Indices(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        self._workers = WorkerGenerators(loader) if loader.num_workers else None
        self._plain_loader: DataLoader[Any] | None = None
        self._source: Iterator[Any] = iter(())
        self._start: dict[str, Any] = {}  # states at the beginning of the epoch, for the next resume
        self._recorded: dict[str, Any] | None = None  # the loaded state, until ``reach``
        self._difference: str | None = None

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report on why a resume may not repeat every batch exactly; None if no reason is known."""
        if self.loader.num_workers and not self.loader.in_order:
            return "in_order=False: workers return batches in another order each time; leave it out"
        return self._difference or self._other_length

    def data_digest(self) -> str | None:
        """Return ``dataset.digest()``, which identifies the samples, or None if the data set has no such method."""
        return dataset_digest(self.loader.dataset)

    # --- an epoch ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the position to the end of the epoch, then end the epoch."""
        if not self.position:
            self.begin(self.epoch)
        while self.has_more():
            yield self.take()
        self.end()

    def begin(self, epoch: int) -> None:
        """Begin a pass over the loader, which counts as epoch number ``epoch``. A pass that has not ended is abandoned."""
        if self.position:
            self.end()
        alive = self._plain_loader is not None and self.loader.persistent_workers
        if self._workers is not None and not alive:
            self._workers.reset()
        self.epoch, self.position = epoch, 0
        point = generator_positions.current_point(self.own_generators.find())
        self._start = {"point": point, "samplers": _attributes(self.loader), "alive": alive}
        self._indices.skip = 0
        self._source = self._iterate()
        self._discard_ahead()

    def has_more(self) -> bool:
        """True if the epoch has another batch. Reads that batch's indices, and with ``ahead`` also loads the batch."""
        if not self._loads_ahead:
            return self._indices.pulled > self.position or self._indices.pull()
        if not self._ahead:
            self._load_ahead()
        return bool(self._ahead)

    def _load_ahead(self) -> None:
        """Load the next batch ahead, if there is one. A batch that must be loaded again after a resume is loaded with the
        generator states recorded for it."""
        if self._reload_ahead and self._before is not None:
            self._own = self.own_generators.find()
            with generator_positions.preserved(), self.own_generators.preserved():
                self._before.restore(self._own)
                self._ahead.append(next(self._source))
        else:
            if self._workers is None:
                if self.position < 2:  # some generators are created when they are first drawn from
                    self._own = self.own_generators.find()
                self._before = generator_positions.current_point(self._own)
            self._ahead.extend(islice(self._source, 1))
        self._reload_ahead = False

    def _discard_ahead(self) -> None:
        """Discard the batch that was loaded ahead, and the generator states with which a resume would load it again."""
        self._ahead.clear()
        self._before, self._reload_ahead = None, False

    def take(self) -> Any:
        """Return the next batch and count it as handed out. Raises ``StopIteration`` at the epoch's end."""
        batch = self._ahead.popleft() if self._ahead else next(self._source)
        self.position += 1
        self._indices.digest_until(self.position)
        return batch if self._workers is None else self._workers.unpack(batch)

    def end(self) -> None:
        """End the pass: the position is then the beginning of the next epoch."""
        if not self._indices.ended or self._indices.pulled > self.position:
            self._plain_loader = None  # persistent workers have read ahead of what was handed out
        self.epoch, self.position, self._start = self.epoch + 1, 0, {}
        self._source = iter(())
        self._discard_ahead()

    def _iterate(self) -> Iterator[Any]:
        """Return an iterator that draws the same random numbers as ``iter(loader)``, in the same order."""
        if self._plain_loader is None:
            self._plain_loader = self._make_loader()
        if self._workers is None:
            return iter(self._plain_loader)
        with dataloader_workers.starting_workers([]):
            return iter(self._plain_loader)

    def _make_loader(self) -> DataLoader[Any]:
        """Return a plain DataLoader with the settings of ``loader`` that reads its indices through ``_Indices``."""
        loader, options = self.loader, dict[str, Any]()
        if loader.batch_sampler is None:
            options |= {"sampler": self._indices, "batch_size": None}
        else:
            options |= {"batch_sampler": self._indices}
        if self._workers is not None:
            options |= {
                "num_workers": loader.num_workers,
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
                "multiprocessing_context": loader.multiprocessing_context,
                "worker_init_fn": self._workers.make_worker_init(os.getpid()),
                "timeout": loader.timeout,
                "in_order": loader.in_order,
            }
        return DataLoader(
            loader.dataset,
            collate_fn=loader.collate_fn if self._workers is None else self._workers.collate,
            pin_memory=loader.pin_memory,
            pin_memory_device=loader.pin_memory_device,
            generator=loader.generator,
            **options,
        )

    # --- a resume ------------------------------------------------------------------------------------------------------

    def reach(self) -> None:
        """Move to the recorded position. If the sampler yields other indices, ``inexact_reason`` says so. Raises ``ValueError``
        if it ends too early."""
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return
        self._resume_note = "position restored"
        now = _attributes(self.loader)
        with generator_positions.preserved(), self.own_generators.preserved():
            if recorded["alive"]:  # workers were running when the epoch began
                self._start_workers()
            if self.position:
                self._reach_within_epoch(recorded)
        _restore_attributes(self.loader, now)
        if self.position and self._difference is None:
            self._difference = self.numbering_problem

    def _start_workers(self) -> None:
        """Start the workers without giving them indices."""
        self._indices.closed = True
        for _ in self._iterate():
            raise AssertionError
        self._indices.closed = False

    def _reach_within_epoch(self, recorded: dict[str, Any]) -> None:
        """Restore the states from the beginning of the epoch, and read the used indices again. ``recorded``: the loaded state."""
        self._start = {
            "point": generator_positions.Point.from_state(recorded["point"]),
            "samplers": recorded["samplers"],
            "alive": recorded["alive"],
        }
        self._start["point"].restore(self.own_generators.find())
        _restore_attributes(self.loader, recorded["samplers"])
        self._indices.skip = self.position
        self._indices.idle = self.position % self.loader.num_workers if self._workers is not None else 0
        self._source = self._iterate()
        for _ in range(self._indices.idle):  # so that each worker gets the same batches as before
            next(self._source)
        self._indices.idle = 0
        self._indices.drop_skipped()
        while self._indices.pulled < recorded["pulled"] and self._indices.pull():
            pass
        found = self._indices.digest_until(self.position), self._indices.digest(recorded["pulled"])
        if found != (recorded["used"], recorded["ahead"]):
            name = type(self._indices.sampler).__name__
            self._difference = (
                f"{name} was read again for the {recorded['pulled']} batches requested in epoch {self.epoch}, of which "
                f"{self.position} were used, and yields other indices: "
                "they must depend only on generators and plain attributes that have the same state as when the epoch "
                "began; pass them to it as a list at the beginning of an epoch"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what ``reach`` needs, such as the epoch, the number of batches taken, and the states that determine the
        order."""
        if self._recorded is not None:
            return dict(self._recorded)
        state: dict[str, Any] = {"kind": self._kind, "epoch": self.epoch, "position": self.position}
        alive = (
            self._start["alive"] if self._start else self._plain_loader is not None and self.loader.persistent_workers
        )
        state |= {
            "length": self.steps_per_epoch,
            "numbers": self.numbering_problem,
            "alive": alive,
            "workers": None if self._workers is None else list(self._workers.states),
        }
        if self.position:
            indices = self._indices
            state |= {"point": self._start["point"].state(), "samplers": self._start["samplers"]}
            used, ahead = indices.digest_until(self.position), indices.digest(indices.pulled)
            state |= {"pulled": indices.pulled, "used": used, "ahead": ahead}
            if self._before is not None and (self._ahead or self._reload_ahead):
                state["before"] = self._before.state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a recorded position, to which ``reach`` moves. Raises ``ValueError`` for another kind of state or another number
        of workers."""
        self.check_kind(state)
        if self._workers is not None or state["workers"] is not None:
            self._load_workers(state["workers"])
        self.epoch, self.position, self._recorded = state["epoch"], state["position"], state
        self.numbering_problem, self._difference = state["numbers"], None
        self._discard_ahead()
        if "before" in state:
            self._before, self._reload_ahead = generator_positions.Point.from_state(state["before"]), True
        self._compare_length(state)

    def check_kind(self, state: dict[str, Any]) -> None:
        """Raise ``ValueError`` unless ``state`` was recorded for this kind of data."""
        if state.get("kind") != self._kind:
            raise ValueError(f"the data position was recorded for {state.get('kind')!r}, this is {self._kind!r}")

    def restart_epoch(self, state: dict[str, Any]) -> bool:
        """Move to the beginning of the epoch in ``state``. Returns True if batches of that epoch had been taken."""
        self.epoch, self.position = state["epoch"], 0
        self._discard_ahead()
        return bool(state.get("position"))

    def _load_workers(self, states: Any) -> None:
        """Load the states of the workers' generators. Raises ``ValueError`` if the number of workers has changed."""
        if self._workers is None or states is None:
            raise ValueError(
                "num_workers has changed from or to 0: samples then draw from other generators; restore the old value"
            )
        self._workers.load(states)


class _Indices:
    """Yields the sampler's indices, batch by batch, to the plain DataLoader. ``skip``: how many batches of indices to leave out.
    ``idle``: how many empty batches to yield first. ``pulled``: how many batches were read from the sampler."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.skip = self.idle = self.pulled = 0
        self.closed = self.ended = False
        self._source: Iterator[Any] = iter(())
        self._pending = deque[Any]()
        self._digests = deque[str]()  # chained digests after each of the last batches of indices

    def __iter__(self) -> Iterator[Any]:
        """Start the sampler from its beginning, and return an iterator over its batches of indices; empty while ``closed`` is
        True."""
        if self.closed:
            return iter(())
        self._source = iter(self.sampler)
        self._pending, self._digests, self.pulled, self.ended = deque(), deque([""]), 0, False
        return self._iterate()

    def pull(self) -> bool:
        """Read one more batch of indices from the sampler for the DataLoader. Returns False if the sampler has ended."""
        for indices in self._source:
            self.pulled += 1
            self._digests.append(_chain_digest(self._digests[-1], indices))
            self._pending.append(indices)
            return True
        self.ended = True
        return False

    def drop_skipped(self) -> None:
        """Read and drop the next ``skip`` batches of indices. Raises ``ValueError`` if there are fewer."""
        while self.skip:
            if not self.pull():
                raise ValueError(
                    f"{type(self.sampler).__name__} ends after {self.pulled} batches, {self.skip} before the recorded position"
                )
            self._pending.popleft()
            self.skip -= 1

    def digest_until(self, position: int) -> str:
        """Return the digest of the first ``position`` batches of indices. The digests of fewer batches are discarded."""
        while len(self._digests) > self.pulled - position + 1:
            self._digests.popleft()
        return self._digests[0]

    def digest(self, number: int) -> str | None:
        """Return the digest of the first ``number`` batches of indices; None if fewer were read."""
        return None if number > self.pulled else self._digests[number - self.pulled - 1]

    def _iterate(self) -> Iterator[Any]:
        """Yield the empty batches, then the sampler's batches of indices without the skipped ones."""
        yield from ([] for _ in range(self.idle))
        self.drop_skipped()
        while self._pending or self.pull():
            yield self._pending.popleft()


def _chain_digest(before: str, indices: Any) -> str:
    """Return the digest of several batches of indices: those with the digest ``before``, and ``indices``, the next batch."""
    plain = type(indices) is list and all(type(index) is int for index in indices)
    text = repr(indices) if plain else BatchDigest(indices).hex()
    return xxhash.xxh3_128_hexdigest((before + text).encode())


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return the loader's batch sampler and sampler, and those inside them, outer ones first."""
    found: list[Any] = []
    waiting = [loader.batch_sampler, loader.sampler]
    while waiting:
        item = waiting.pop(0)
        if hasattr(item, "__dict__") and all(item is not other for other in found):
            found.append(item)
            waiting += [getattr(item, name, None) for name in ("batch_sampler", "sampler")]
    return found


def _attributes(loader: DataLoader[Any]) -> Attributes:
    """Return the plain attributes (numbers, strings, booleans, None) of each sampler of the loader, outer samplers first."""
    return [{name: value for name, value in vars(one).items() if type(value) in _PLAIN} for one in _samplers(loader)]


def _restore_attributes(loader: DataLoader[Any], recorded: Attributes) -> None:
    """Set the samplers' attributes to those that ``_attributes`` returned."""
    for one, attributes in zip(_samplers(loader), recorded, strict=False):
        vars(one).update(attributes)


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the loader's samplers that have it (``DistributedSampler``)."""
    for one in _samplers(loader):
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(epoch)
