"""Which elements of which live tensors one rank copies and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch

from ratchet_contract.manifest import RANK_PREFIX, SHARED_PREFIX
from ratchet_store.slices import Slice
from ratchet_worker.live_memory import LiveTensors, is_row_major
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


class Listed(Sequence[Source]):
    """Sources of this save's tensors and of columns that stay the same from save to save. Each ``Source`` is made when the first
    of them is asked for. ``tensors``, ``addresses`` and ``versions``: as ``LiveTensors`` has them, in the sources' order."""

    def __init__(self, columns: _Columns, numbers: Sequence[int], shared: LiveTensors, private: LiveTensors) -> None:
        self.tensors = [shared.tensors[n] for n in numbers] + private.tensors
        self.addresses = [shared.addresses[n] for n in numbers] + private.addresses
        self.versions = [shared.versions[n] for n in numbers] + private.versions
        self._columns = columns

    @cached_property
    def _each(self) -> list[Source]:
        names, starts, stops, untils = self._columns
        return [*map(Source, names, self.tensors, starts, stops, untils)]

    @overload
    def __getitem__(self, at: int) -> Source: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Source]: ...
    def __getitem__(self, at: int | slice) -> Source | Sequence[Source]:
        return self._each[at]

    def __iter__(self) -> Iterator[Source]:
        return iter(self._each)

    def __len__(self) -> int:
        return len(self.tensors)


class Sources(NamedTuple):
    """``form``: the same object as for an older list where all but the tensors themselves is the same, and these have the same
    shapes, dtypes and order in memory. None: not known."""

    each: Sequence[Source]
    form: object = None

    @property
    def live(self) -> Listed | LiveTensors:
        """The tensors of ``each`` as they are now, in its order."""
        if isinstance(self.each, Listed):
            return self.each
        return LiveTensors([source.name for source in self.each], [source.tensor for source in self.each])


class Lister:
    """Lists one rank's slices of the shared tensors and all of its private ones. From save to save only the tensors change, as
    long as the names, shapes and slices stay."""

    def __init__(self, rank: int) -> None:
        self._prefix = f"{RANK_PREFIX}{rank}/"
        self._sizes: Sizes | None = None
        self._slices: Sequence[Slice] = ()
        self._private: list[Any] = []
        self._columns: _Columns = ([], [], [], [])
        self._numbers: list[int] = []
        self._form = object()

    def of(self, snapshot: Snapshot, slices: Sequence[Slice]) -> Sources:
        """``slices``: the same object as before where they are the same."""
        until, sizes, shared = snapshot.until, snapshot.sizes(), snapshot.shared
        private = [(name, t.dtype, t.shape, until.get(name), is_row_major(t)) for name, t in snapshot.private.items()]
        if sizes is not self._sizes or slices is not self._slices or private != self._private:
            self._sizes, self._slices, self._private, self._form = sizes, slices, private, object()
            self._columns = self._listed(snapshot, slices)
            number = {name: n for n, (name, _, _) in enumerate(sizes)}
            self._numbers = [number[s.name] for s in slices]
        if not isinstance(shared, LiveTensors):
            shared = LiveTensors([*shared], [*shared.values()])
        own = LiveTensors([*snapshot.private], [*snapshot.private.values()])
        return Sources(Listed(self._columns, self._numbers, shared, own), self._form)

    def _listed(self, snapshot: Snapshot, slices: Sequence[Slice]) -> _Columns:
        until, private = snapshot.until, snapshot.private
        return (
            [f"{SHARED_PREFIX}{s.name}" for s in slices] + [f"{self._prefix}{name}" for name in private],
            [s.start for s in slices] + [0] * len(private),
            [s.stop for s in slices] + [t.numel() for t in private.values()],
            [until.get(name, Until.BOUNDARY) for name in (*(s.name for s in slices), *private)],
        )


_Columns = tuple[list[str], list[int], list[int], list[Until]]
"""Names, starts, stops and times of sources."""
