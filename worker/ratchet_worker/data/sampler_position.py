"""A DataLoader over a map-style data set, whose position in an epoch comes back through its sampler, without loading a sample.

The order of an epoch follows from where the generators, and the plain attributes of the samplers, stood when it began. A resume
puts them there, asks the sampler once more for the indices that were used, compares them by a digest, and loads nothing. Any
sampler and batch sampler will do that gives the same indices again.

What a sample draws while it is loaded is what a plain DataLoader draws. In the rank's own process the process-wide generators
stand, at a step boundary, where the last batch left them; those of workers come with their batches (``worker_generators``).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import torch
import xxhash
from torch.utils.data import DataLoader

from ratchet_worker.data import points, workers
from ratchet_worker.data.batch_digest import BatchDigest
from ratchet_worker.data.digest import dataset_digest
from ratchet_worker.data.loader_position import LoaderPosition
from ratchet_worker.data.own_generators import OwnGenerators
from ratchet_worker.data.worker_generators import WorkerGenerators

_PLAIN: Final = (type(None), bool, int, float, str)
Attributes = list[dict[str, Any]]
"""Plain attributes of each sampler."""


def fits(loader: DataLoader[Any]) -> bool:
    """Is it a DataLoader whose batches follow from its sampler's indices alone?"""
    plain = type(loader).__iter__ is DataLoader.__iter__ and not hasattr(loader, "state_dict")
    alone = loader.batch_sampler is None and loader.num_workers > 0
    return plain and not isinstance(loader.dataset, torch.utils.data.IterableDataset) and not alone


class SamplerPosition(LoaderPosition):
    """This rank's batches of ``loader``; fits ``TrainData``. ``position``: batches of the epoch that were handed out.

    ``begin`` an epoch; as long as there are ``more`` batches ``take`` one; ``end`` it, or ``begin`` another. Behind
    ``load_state_dict`` and ``own_generators.load`` ``reach`` goes to the recorded position; generators then stand as before.

    ``ahead``: ``more`` loads the batch that it finds. A resume loads it again, from the generators that it was loaded from.
    """

    def __init__(self, loader: DataLoader[Any], *, ahead: bool = False) -> None:
        super().__init__(loader)
        self.epoch = self.position = 0
        self._kind = "sampler, one ahead" if ahead else "sampler"
        self._loads_ahead, self._ahead = ahead, deque[Any]()
        self._before: points.Point | None = None  # where generators stood when it was loaded, in this process
        self._load_again = False  # it is not there yet, after a resume
        self._own: dict[str, Any] = {}  # generators of the loader, as the last look found them
        roots = {
            name: getattr(loader, name) for name in ("dataset", "collate_fn", "sampler", "batch_sampler", "generator")
        }
        self.own_generators = OwnGenerators(roots)
        self._indices = _Indices(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        self._workers = WorkerGenerators(loader) if loader.num_workers else None
        self._plain: DataLoader[Any] | None = None
        self._source: Iterator[Any] = iter(())
        self._start: dict[str, Any] = {}  # of the epoch, for the next resume
        self._recorded: dict[str, Any] | None = None  # until it is reached
        self._differs: str | None = None

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report; None where every batch comes again as it was."""
        if self.loader.num_workers and not self.loader.in_order:
            return "in_order=False: workers hand batches over in another order each time; leave it out"
        return self._differs or self._other_length

    def data_digest(self) -> str | None:
        """Names the samples, if the data set can (``dataset.digest()``)."""
        return dataset_digest(self.loader.dataset)

    # --- an epoch ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch, or the next one."""
        if not self.position:
            self.begin(self.epoch)
        while self.more():
            yield self.take()
        self.end()

    def begin(self, epoch: int) -> None:
        """A pass over the loader begins; the one before is given up, if it has not ended."""
        if self.position:
            self.end()
        alive = self._plain is not None and self.loader.persistent_workers
        if self._workers is not None and not alive:
            self._workers.forget()
        self.epoch, self.position = epoch, 0
        point = points.here(self.own_generators.find())
        self._start = {"point": point, "samplers": _attributes(self.loader), "alive": alive}
        self._indices.skip = 0
        self._source = self._iterate()
        self._forget_ahead()

    def more(self) -> bool:
        """Is there a batch that was not handed out? Asks the sampler for indices, and loads nothing but one batch ``ahead``."""
        if not self._loads_ahead:
            return self._indices.pulled > self.position or self._indices.pull()
        if not self._ahead:
            self._load_ahead()
        return bool(self._ahead)

    def _load_ahead(self) -> None:
        if self._load_again and self._before is not None:
            self._own = self.own_generators.find()
            with points.kept(), self.own_generators.kept():
                self._before.put(self._own)
                self._ahead.append(next(self._source))
        else:
            if self._workers is None:
                if self.position < 2:  # some are made when they are first drawn from
                    self._own = self.own_generators.find()
                self._before = points.here(self._own)
            self._ahead.extend(islice(self._source, 1))
        self._load_again = False

    def _forget_ahead(self) -> None:
        self._ahead.clear()
        self._before, self._load_again = None, False

    def take(self) -> Any:
        """The next batch."""
        batch = self._ahead.popleft() if self._ahead else next(self._source)
        self.position += 1
        self._indices.used_until(self.position)
        return batch if self._workers is None else self._workers.take(batch)

    def end(self) -> None:
        """The pass is over: from here on the position is the beginning of the next epoch."""
        if not self._indices.over or self._indices.pulled > self.position:
            self._plain = None  # persistent workers have read ahead of what was handed out
        self.epoch, self.position, self._start = self.epoch + 1, 0, {}
        self._source = iter(())
        self._forget_ahead()

    def _iterate(self) -> Iterator[Any]:
        """As ``iter(loader)``: it draws what that draws, in the same order."""
        if self._plain is None:
            self._plain = self._made()
        if self._workers is None:
            return iter(self._plain)
        with workers.starting([]):
            return iter(self._plain)

    def _made(self) -> DataLoader[Any]:
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
                "worker_init_fn": self._workers.starter(os.getpid()),
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
        """Go to the recorded position, within the epoch too. Raises ``ValueError`` where the sampler ends before."""
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return
        self._told = "position restored"
        now = _attributes(self.loader)
        with points.kept(), self.own_generators.kept():
            if recorded["alive"]:  # workers that are there when the epoch begins
                self._start_workers()
            if self.position:
                self._again(recorded)
        _put_attributes(self.loader, now)
        if self.position and self._differs is None:
            self._differs = self.numbers

    def _start_workers(self) -> None:
        self._indices.closed = True
        for _ in self._iterate():
            raise AssertionError
        self._indices.closed = False

    def _again(self, recorded: dict[str, Any]) -> None:
        self._start = {
            "point": points.Point.of(recorded["point"]),
            "samplers": recorded["samplers"],
            "alive": recorded["alive"],
        }
        self._start["point"].put(self.own_generators.find())
        _put_attributes(self.loader, recorded["samplers"])
        self._indices.skip = self.position
        self._indices.idle = self.position % self.loader.num_workers if self._workers is not None else 0
        self._source = self._iterate()
        for _ in range(self._indices.idle):  # so that each worker has its own batches again
            next(self._source)
        self._indices.idle = 0
        self._indices.drop()
        while self._indices.pulled < recorded["pulled"] and self._indices.pull():
            pass
        found = self._indices.used_until(self.position), self._indices.digest(recorded["pulled"])
        if found != (recorded["used"], recorded["ahead"]):
            name = type(self._indices.sampler).__name__
            self._differs = (
                f"{name}, asked again for the {recorded['pulled']} batches of epoch {self.epoch} that were asked for, of which "
                f"{self.position} were used, gives other indices: "
                "they must depend on nothing but generators, and on plain attributes, that stand as they did when the epoch "
                "began; give them to it as a list at the beginning of an epoch"
            )

    def state_dict(self) -> dict[str, Any]:
        """Epoch and batches taken in it, and what the order of the epoch follows from."""
        if self._recorded is not None:
            return dict(self._recorded)
        state: dict[str, Any] = {"kind": self._kind, "epoch": self.epoch, "position": self.position}
        alive = self._start["alive"] if self._start else self._plain is not None and self.loader.persistent_workers
        state |= {
            "length": self.steps_per_epoch,
            "numbers": self.numbers,
            "alive": alive,
            "workers": None if self._workers is None else list(self._workers.states),
        }
        if self.position:
            indices = self._indices
            state |= {"point": self._start["point"].state(), "samplers": self._start["samplers"]}
            used, ahead = indices.used_until(self.position), indices.digest(indices.pulled)
            state |= {"pulled": indices.pulled, "used": used, "ahead": ahead}
            if self._before is not None and (self._ahead or self._load_again):
                state["before"] = self._before.state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a recorded point; ``reach`` does. Raises ``ValueError`` for the state of something else."""
        if state.get("kind") != self._kind:
            raise ValueError(f"the data position was recorded for {state.get('kind')!r}, this is {self._kind!r}")
        if self._workers is not None or state["workers"] is not None:
            self._load_workers(state["workers"])
        self.epoch, self.position, self._recorded = state["epoch"], state["position"], state
        self.numbers, self._differs = state["numbers"], None
        self._forget_ahead()
        if "before" in state:
            self._before, self._load_again = points.Point.of(state["before"]), True
        self._compare_length(state)

    def begin_again(self, state: dict[str, Any]) -> bool:
        """For another number of ranks: the beginning of the epoch of ``state``. True: batches of it were taken."""
        self.epoch, self.position = state["epoch"], 0
        self._forget_ahead()
        return bool(state.get("position"))

    def _load_workers(self, states: Any) -> None:
        if self._workers is None or states is None:
            raise ValueError(
                "num_workers was 0, or is now: samples draw from other generators there; restore the old value"
            )
        self._workers.load(states)


class _Indices:
    """What the loader's sampler gives, as the plain DataLoader asks for it. ``skip``: batches of indices to leave out; ``idle``:
    empty ones before the first; ``closed``: none at all."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.skip = self.idle = self.pulled = 0
        self.closed = self.over = False
        self._source: Iterator[Any] = iter(())
        self._waiting = deque[Any]()
        self._digests = deque[str]()  # behind each of the last ones

    def __iter__(self) -> Iterator[Any]:
        if self.closed:
            return iter(())
        self._source = iter(self.sampler)
        self._waiting, self._digests, self.pulled, self.over = deque(), deque([""]), 0, False
        return self._give()

    def pull(self) -> bool:
        """Ask for one more. False: the sampler has ended."""
        for indices in self._source:
            self.pulled += 1
            self._digests.append(_chained(self._digests[-1], indices))
            self._waiting.append(indices)
            return True
        self.over = True
        return False

    def drop(self) -> None:
        """What is to be left out. Raises ``ValueError`` where there is less."""
        while self.skip:
            if not self.pull():
                raise ValueError(
                    f"{type(self.sampler).__name__} ends after {self.pulled} batches, {self.skip} before where it was"
                )
            self._waiting.popleft()
            self.skip -= 1

    def used_until(self, position: int) -> str:
        """Digest of the first ``position`` batches of indices; those of fewer are forgotten."""
        while len(self._digests) > self.pulled - position + 1:
            self._digests.popleft()
        return self._digests[0]

    def digest(self, number: int) -> str | None:
        """Of the first ``number`` batches of indices, at least as many as ``used_until`` was asked for; None: there are fewer."""
        return None if number > self.pulled else self._digests[number - self.pulled - 1]

    def _give(self) -> Iterator[Any]:
        yield from ([] for _ in range(self.idle))
        self.drop()
        while self._waiting or self.pull():
            yield self._waiting.popleft()


def _chained(before: str, indices: Any) -> str:
    plain = type(indices) is list and all(type(index) is int for index in indices)
    text = repr(indices) if plain else BatchDigest(indices).hex()
    return xxhash.xxh3_128_hexdigest((before + text).encode())


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """The loader's, and those below a batch sampler."""
    found: list[Any] = []
    waiting = [loader.batch_sampler, loader.sampler]
    while waiting:
        item = waiting.pop(0)
        if hasattr(item, "__dict__") and all(item is not other for other in found):
            found.append(item)
            waiting += [getattr(item, name, None) for name in ("batch_sampler", "sampler")]
    return found


def _attributes(loader: DataLoader[Any]) -> Attributes:
    return [{name: value for name, value in vars(one).items() if type(value) in _PLAIN} for one in _samplers(loader)]


def _put_attributes(loader: DataLoader[Any], recorded: Attributes) -> None:
    for one, attributes in zip(_samplers(loader), recorded, strict=False):
        vars(one).update(attributes)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell it to samplers (``DistributedSampler``) that ask for it."""
    for one in _samplers(loader):
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(epoch)
