"""Which elements of which live tensors one rank copies and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch

from ratchet_contract.manifest import RANK_PREFIX, SHARED_PREFIX
from ratchet_store.slices import Slice
from ratchet_worker.held import Held
from ratchet_worker.snapshot import Sizes, Snapshot, Until, is_plain


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
    """Of tensors that are new, and of columns that are kept from save to save: made once somebody looks at one. ``addresses``: as
    ``address`` gives them; ``memory`` holds that of the tensors."""

    def __init__(
        self,
        columns: _Columns,
        tensors: Sequence[torch.Tensor],
        addresses: Sequence[int],
        memory: object,
        numbers: Sequence[int],
    ) -> None:
        """``numbers``: of the first ones among those whose ``memory`` it is."""
        self.tensors, self.addresses = tensors, addresses
        self._columns, self._memory, self._numbers = columns, memory, numbers

    def gone(self, at: int) -> bool:
        """Does what ``addresses`` has of it lie there no more?"""
        there, held = self.addresses[at], self._memory
        if not there or there == self.tensors[at].data_ptr():
            return False
        return at >= len(self._numbers) or not isinstance(held, Held) or held.gone(self._numbers[at])

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
    """``form``: the same object as of older ones where all but the tensors themselves is the same, and these have the same shapes
    and dtypes. None: nobody knows."""

    each: Sequence[Source]
    form: object = None

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Of ``each``, in its order."""
        return self.each.tensors if isinstance(self.each, Listed) else [source.tensor for source in self.each]

    @property
    def addresses(self) -> Sequence[int]:
        """Of the same tensors; to be asked before these are given other memory."""
        return (
            self.each.addresses if isinstance(self.each, Listed) else [address(source.tensor) for source in self.each]
        )

    def gone(self, at: int) -> bool:
        """Was the memory of this one given back since its address was taken?"""
        return isinstance(self.each, Listed) and self.each.gone(at)


def address(tensor: torch.Tensor) -> int:
    """Where its bytes lie in this process's memory, row-major as they are stored; 0: they do not, or there are none."""
    return tensor.data_ptr() if is_plain(tensor) else 0


class Lister:
    """Of one rank: its slices of the shared tensors, and all of its private ones. From save to save only the tensors are put into
    a list that is otherwise the same."""

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
        private = [(name, t.dtype, t.shape, until.get(name)) for name, t in snapshot.private.items()]
        if sizes is not self._sizes or slices is not self._slices or private != self._private:
            self._sizes, self._slices, self._private, self._form = sizes, slices, private, object()
            self._columns = self._listed(snapshot, slices)
            number = {name: n for n, (name, _, _) in enumerate(sizes)}
            self._numbers = [number[s.name] for s in slices]
        own, numbers = snapshot.private.values(), self._numbers
        if isinstance(shared, Held):
            tensors, addresses = [shared.tensors[n] for n in numbers], [shared.addresses[n] for n in numbers]
        else:
            views = [*shared.values()]
            tensors = [views[n] for n in numbers]
            addresses = [*map(address, tensors)]
        listed = Listed(self._columns, [*tensors, *own], [*addresses, *map(address, own)], shared, numbers)
        return Sources(listed, self._form)

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
