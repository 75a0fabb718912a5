"""Generators in the workers of a DataLoader. A worker reads ahead, so each batch carries the states of its worker's generators
after the batch, unless they have not changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from ratchet_hooks.state.encode import decode, encode
from ratchet_worker.data import dataloader_workers, generator_positions
from ratchet_worker.data.data_generators import OwnGenerators

Packed = dict[str, Any]
"""An encoded ``Point``: ``arrays`` by name, and ``facts``. NumPy arrays, since tensors would travel through shared memory."""


class WorkerGenerators:
    """States of the generators in the workers of ``loader``. ``states``: one entry per worker; None: the worker begins with the
    generators that a DataLoader gives it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.states: list[Packed | None] = [None] * loader.num_workers
        self._loader = loader

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """A ``collate_fn`` for the workers around the DataLoader's own. It returns the batch with the worker's generator states,
        for ``unpack``."""
        return _Collate(self._loader.collate_fn)

    def make_worker_init(self, parent: int) -> Callable[[int], None]:
        """Return a ``worker_init_fn`` that also sets the worker's generators to its entry in ``states``. ``parent``: the rank's
        process id."""
        return partial(_init_worker, parent, self._loader.worker_init_fn, self._loader.collate_fn, self.states)

    def reset(self) -> None:
        """Forget all states: workers that start later begin with the generators that a DataLoader gives them."""
        self.states[:] = [None] * len(self.states)

    def unpack(self, delivered: Any) -> Any:
        """Return the batch in ``delivered``, a result of ``collate``, and store the generator states that came with it."""
        batch, worker, state = delivered
        if state is not None:
            self.states[worker] = state
        return batch

    def load(self, states: list[Packed | None]) -> None:
        """Replace the states. Raises ``ValueError`` for another number of workers."""
        if len(states) != len(self.states):
            raise ValueError(f"num_workers was {len(states)}, now it is {len(self.states)}; restore the old value")
        self.states[:] = states


class _Collate:
    """Collates in a worker, and adds the worker's number and generator states. If there are no samples, the batch is None."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._own: dict[str, Any] | None = None
        self._last: Packed | None = None

    def __call__(self, samples: list[Any]) -> tuple[Any, int, Packed | None]:
        """Return the collated batch, the worker's number, and the worker's generator states after it (None if unchanged)."""
        info = get_worker_info()
        assert info is not None
        # Such a batch only makes the following one the next worker's.
        if not samples:
            return None, info.id, None
        batch = self._collate(samples)
        if self._own is None:  # after the first batch: some generators are created when they are first drawn from
            self._own = _find_own_generators(info.dataset, self._collate)
        now = _pack(generator_positions.current_point(self._own))
        if self._last is not None and _is_same(now, self._last):
            return batch, info.id, None
        self._last = now
        return batch, info.id, now


def _init_worker(
    parent: int, own: Callable[[int], None] | None, collate: Any, states: list[Packed | None], worker: int
) -> None:
    """Initialise a worker, in its process: handle signals, call the DataLoader's own ``worker_init_fn`` (``own``, if any), and
    restore the worker's generators from ``states``, if recorded. ``parent``: the rank's process id."""
    dataloader_workers.init_worker(parent, worker)
    if own is not None:
        own(worker)
    info, state = get_worker_info(), states[worker]
    if state is not None:
        assert info is not None
        tensors = {name: torch.from_numpy(array.copy()) for name, array in state["arrays"].items()}
        found: Any = decode(tensors, state["facts"])
        generator_positions.Point.from_state(found).restore(_find_own_generators(info.dataset, collate))


def _find_own_generators(dataset: Any, collate: Any) -> dict[str, Any]:
    """Return the generators that a worker's data set and ``collate_fn`` hold, by path."""
    return OwnGenerators({"dataset": dataset, "collate_fn": collate}).find()


def _pack(point: generator_positions.Point) -> Packed:
    """Encode a point with NumPy arrays in place of tensors."""
    tensors, facts = encode(point.state(), root="generators")
    return {"arrays": {name: tensor.numpy() for name, tensor in tensors.items()}, "facts": facts}


def _is_same(a: Packed, b: Packed) -> bool:
    """True if both encoded points are equal."""
    arrays = a["arrays"], b["arrays"]
    return a["facts"] == b["facts"] and all(np.array_equal(array, arrays[1][name]) for name, array in arrays[0].items())
