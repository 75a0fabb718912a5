"""Lists the elements of live tensors that one rank copies and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch

from ratchet_contract.checkpoint.manifest import RANK_PREFIX, SHARED_PREFIX
from ratchet_store.format.shard_slices import Slice
from ratchet_worker.state.live_memory import LiveTensors, is_row_major
from ratchet_worker.state.snapshot import Sizes, Snapshot, Until, digest, flat


class Source(NamedTuple):
    """The elements ``start <= i < stop`` (row-major) of a live tensor, to be copied. ``name``: the stored name, with prefix;
    ``until``: how long the tensor stays unchanged."""

    name: str
    tensor: torch.Tensor
    start: int
    stop: int
    until: Until

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.tensor.element_size()


class Listed(Sequence[Source]):
    """A lister's sources, as a sequence. ``tensors``, ``addresses`` and ``versions``: as in ``LiveTensors``, in the sources'
    order."""

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
    """The sources of one capture. ``layout_key``: if two ``Sources`` have the same object, they have the same layout; None:
    this is not known."""

    entries: Sequence[Source]
    layout_key: object = None

    @property
    def live_tensors(self) -> Listed | LiveTensors:
        """The tensors of ``entries``, in the same order, with their addresses and counts of changes."""
        if isinstance(self.entries, Listed):
            return self.entries
        return LiveTensors([source.name for source in self.entries], [source.tensor for source in self.entries])


class Lister:
    """Lists one rank's slices of the shared tensors and all of its private ones."""

    def __init__(self, rank: int) -> None:
        self._prefix = f"{RANK_PREFIX}{rank}/"
        self._sizes: Sizes | None = None
        self._slices: Sequence[Slice] = ()
        self._private: list[Any] = []
        self._columns: _Columns = ([], [], [], [])
        self._numbers: list[int] = []
        self._layout_key = object()

    def list_sources(self, snapshot: Snapshot, slices: Sequence[Slice]) -> Sources:
        """Return the sources of ``snapshot``: this rank's ``slices`` of the shared tensors, then all private ones."""
        until, sizes, shared = snapshot.until, snapshot.sizes(), snapshot.shared
        private = [(name, t.dtype, t.shape, until.get(name), is_row_major(t)) for name, t in snapshot.private.items()]
        if sizes is not self._sizes or slices is not self._slices or private != self._private:
            self._sizes, self._slices, self._private, self._layout_key = sizes, slices, private, object()
            self._columns = self._build_columns(snapshot, slices)
            number = {name: n for n, (name, _, _) in enumerate(sizes)}
            self._numbers = [number[s.name] for s in slices]
        if not isinstance(shared, LiveTensors):
            shared = LiveTensors([*shared], [*shared.values()])
        own = LiveTensors([*snapshot.private], [*snapshot.private.values()])
        return Sources(Listed(self._columns, self._numbers, shared, own), self._layout_key)

    def _build_columns(self, snapshot: Snapshot, slices: Sequence[Slice]) -> _Columns:
        """Return names, starts, stops and kinds of the sources of ``snapshot``."""
        until, private = snapshot.until, snapshot.private
        return (
            [f"{SHARED_PREFIX}{s.name}" for s in slices] + [f"{self._prefix}{name}" for name in private],
            [s.start for s in slices] + [0] * len(private),
            [s.stop for s in slices] + [t.numel() for t in private.values()],
            [until.get(name, Until.BOUNDARY) for name in (*(s.name for s in slices), *private)],
        )


_Columns = tuple[list[str], list[int], list[int], list[Until]]
"""Names, starts, stops and times of sources."""


class Audit:
    """Detects changes of ``Until.STEP`` tensors between two steps by digests, since torch does not count changes through
    ``tensor.data``. Create it at a step boundary, and call ``first_changed`` before the next ``optimizer.step()``."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = [s for s in sources if s.until is Until.STEP]
        self._before = [_digest(s) for s in self._sources]

    def first_changed(self) -> str | None:
        """Return the name of the first tensor whose elements have changed since the audit was created; None if none has."""
        for source, before in zip(self._sources, self._before, strict=True):
            if _digest(source) != before:
                return source.name
        return None


def _digest(source: Source) -> str:
    """Return the digest of the source's current elements."""
    return digest([flat(source.tensor)[source.start : source.stop]])
