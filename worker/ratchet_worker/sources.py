"""Which elements of which live tensors one rank copies and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ratchet_contract.manifest import RANK_PREFIX, SHARED_PREFIX
from ratchet_store.slices import Slice
from ratchet_worker.snapshot import Sizes, Snapshot, Until


class Source(NamedTuple):
    """Elements ``start <= i < stop`` (row-major) of a live tensor. ``name``: with its prefix, as it is stored."""

    name: str
    tensor: torch.Tensor
    start: int
    stop: int
    until: Until

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.tensor.element_size()


class Sources(NamedTuple):
    """``form``: the same object as of older ones where all but the tensors themselves is the same, and these have the same shapes
    and dtypes. None: nobody knows."""

    each: Sequence[Source]
    form: object = None


class Lister:
    """Of one rank: its slices of the shared tensors, and all of its private ones. From save to save only the tensors are put into
    a list that is otherwise the same."""

    def __init__(self, rank: int) -> None:
        self._prefix = f"{RANK_PREFIX}{rank}/"
        self._sizes: Sizes | None = None
        self._slices: Sequence[Slice] = ()
        self._private: list[Any] = []
        self._columns: tuple[list[str], list[int], list[int], list[Until]] = ([], [], [], [])
        self._form = object()

    def of(self, snapshot: Snapshot, slices: Sequence[Slice]) -> Sources:
        """``slices``: the same object as before where they are the same."""
        until, sizes = snapshot.until, snapshot.sizes()
        private = [(name, t.dtype, t.shape, until.get(name)) for name, t in snapshot.private.items()]
        if sizes is not self._sizes or slices is not self._slices or private != self._private:
            self._sizes, self._slices, self._private, self._form = sizes, slices, private, object()
            self._columns = self._listed(snapshot, slices)
        names, starts, stops, untils = self._columns
        tensors = [snapshot.shared[s.name] for s in slices]
        tensors += snapshot.private.values()
        return Sources([*map(Source, names, tensors, starts, stops, untils)], self._form)

    def _listed(
        self, snapshot: Snapshot, slices: Sequence[Slice]
    ) -> tuple[list[str], list[int], list[int], list[Until]]:
        until, private = snapshot.until, snapshot.private
        return (
            [f"{SHARED_PREFIX}{s.name}" for s in slices] + [f"{self._prefix}{name}" for name in private],
            [s.start for s in slices] + [0] * len(private),
            [s.stop for s in slices] + [t.numel() for t in private.values()],
            [until.get(name, Until.BOUNDARY) for name in (*(s.name for s in slices), *private)],
        )
