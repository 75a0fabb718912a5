"""Generators of a DataLoader's workers: where each stood behind its last batch that was handed out.

A worker reads ahead and nobody can ask it for a state. So each batch comes with the state of the generators of its worker behind
it, where they have moved: the process-wide ones and those that its copies of the data set and ``collate_fn`` hold. Workers that
are started in a resumed epoch begin there. The batches themselves, and what they draw, are those of a plain DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from ratchet_hooks.codec import decode, encode
from ratchet_worker.data import points, workers
from ratchet_worker.data.own_generators import OwnGenerators

Packed = dict[str, Any]
"""``arrays`` by name, and ``facts``: a ``Point`` as ``codec`` has it. Arrays, since tensors would travel by shared memory."""


class WorkerGenerators:
    """Of one ``loader``. ``states``: of each worker; None: as it was started."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.states: list[Packed | None] = [None] * loader.num_workers
        self._loader = loader

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """For the DataLoader, in place of its own: ``take`` undoes it."""
        return _Collate(self._loader.collate_fn)

    def starter(self, parent: int) -> Callable[[int], None]:
        """For the DataLoader, in place of its own ``worker_init_fn``. It reads ``states`` when workers are started."""
        return partial(_start, parent, self._loader.worker_init_fn, self._loader.collate_fn, self.states)

    def forget(self) -> None:
        """The next workers begin as a DataLoader starts them."""
        self.states[:] = [None] * len(self.states)

    def take(self, delivered: Any) -> Any:
        """The batch of what ``collate`` made."""
        batch, worker, state = delivered
        if state is not None:
            self.states[worker] = state
        return batch

    def load(self, states: list[Packed | None]) -> None:
        """Raises ``ValueError`` for another number of workers."""
        if len(states) != len(self.states):
            raise ValueError(f"num_workers was {len(states)}, now it is {len(self.states)}; restore the old value")
        self.states[:] = states


class _Collate:
    """In a worker. No samples: nothing is loaded, so that the next worker has its turn."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._own: dict[str, Any] | None = None
        self._last: Packed | None = None

    def __call__(self, samples: list[Any]) -> tuple[Any, int, Packed | None]:
        info = get_worker_info()
        assert info is not None
        if not samples:
            return None, info.id, None
        batch = self._collate(samples)
        if self._own is None:  # behind the first batch: some are made when they are first drawn from
            self._own = _own(info.dataset, self._collate)
        now = _packed(points.here(self._own))
        if self._last is not None and _same(now, self._last):
            return batch, info.id, None
        self._last = now
        return batch, info.id, now


def _start(
    parent: int, own: Callable[[int], None] | None, collate: Any, states: list[Packed | None], worker: int
) -> None:
    workers.init_worker(parent, worker)
    if own is not None:
        own(worker)
    info, state = get_worker_info(), states[worker]
    if state is not None:
        assert info is not None
        tensors = {name: torch.from_numpy(array.copy()) for name, array in state["arrays"].items()}
        found: Any = decode(tensors, state["facts"])
        points.Point.of(found).put(_own(info.dataset, collate))


def _own(dataset: Any, collate: Any) -> dict[str, Any]:
    return OwnGenerators({"dataset": dataset, "collate_fn": collate}).find()


def _packed(point: points.Point) -> Packed:
    tensors, facts = encode(point.state(), where="generators")
    return {"arrays": {name: tensor.numpy() for name, tensor in tensors.items()}, "facts": facts}


def _same(a: Packed, b: Packed) -> bool:
    arrays = a["arrays"], b["arrays"]
    return a["facts"] == b["facts"] and all(np.array_equal(array, arrays[1][name]) for name, array in arrays[0].items())
