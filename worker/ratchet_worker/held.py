"""Tensors as they are at one boundary, without a view of each: training waits while those are made, and the memory alone is held
in a fifth of the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from ratchet_contract.errors import StateError
from ratchet_worker.snapshot import is_plain

GONE: Final = (
    "the storage of {name} was resized before it was copied: set checkpoint.staging to blocking, which copies everything before "
    "the next step begins"
)
_USUAL: Final = (torch.Tensor, torch.nn.Parameter)


class Places:
    """What follows from the tensors' names and forms, and is kept from save to save: which is where, and which cannot be found by
    an address alone (of another device, not contiguous, without elements)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.numbers = {name: number for number, name in enumerate(tensors)}
        listed = enumerate(tensors.values())
        self.apart = frozenset(number for number, tensor in listed if not (is_plain(tensor) and tensor.numel()))
        self.forms = [(t.dtype, t.device, t.shape, t.stride()) for t in tensors.values()]
        self.itemsizes = [tensor.element_size() for tensor in tensors.values()]


def places_of(tensors: Mapping[str, torch.Tensor]) -> Places | None:
    """None: some are of a kind that has no memory of the usual form."""
    usual = all(type(t) in _USUAL and t.layout is torch.strided for t in tensors.values())
    return Places(tensors) if usual else None


class Held(Mapping[str, torch.Tensor]):
    """By name, as views that hold the memory: code that gives a tensor other memory (``parameter.data = ...``) afterwards changes
    what the next save has, not this one.

    ``tensors``: in order, with torch's count of their changes; ``addresses``: where each begins, 0 where an address alone does
    not find it. The others of ``tensors`` are the live ones, which may have other memory soon: the address holds for as long as
    this object is there, unless a storage is resized (``gone``).
    """

    def __init__(self, places: Places, tensors: Sequence[torch.Tensor]) -> None:
        """``tensors``: live, of the forms that ``places`` was made of."""
        self._places = places
        self._memory = [*map(torch.Tensor.untyped_storage, tensors)]
        self.addresses = [*map(torch.Tensor.data_ptr, tensors)]
        self.tensors = [*tensors]
        for number in places.apart:
            self.tensors[number], self.addresses[number] = self.tensors[number].detach(), 0

    def __getitem__(self, name: str) -> torch.Tensor:
        number = self._places.numbers[name]
        if number in self._places.apart:
            return self.tensors[number]
        (dtype, device, shape, stride), memory = self._places.forms[number], self._memory[number]
        address, itemsize = self.place(name)
        offset = (address - memory.data_ptr()) // itemsize
        return torch.empty(0, dtype=dtype, device=device).set_(memory, offset, shape, stride)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places.numbers)

    def __len__(self) -> int:
        return len(self._places.numbers)

    @property
    def numbers(self) -> Mapping[str, int]:
        """Which of ``tensors``, by name."""
        return self._places.numbers

    def place(self, name: str) -> tuple[int, int]:
        """Of ``addresses``, and bytes per element. Raises ``StateError`` where nothing of it lies there any more."""
        number = self._places.numbers[name]
        if self.gone(number):
            raise StateError(GONE.format(name=name))
        return self.addresses[number], self._places.itemsizes[number]

    def gone(self, number: int) -> bool:
        """Was the memory of this one of ``tensors`` given back, as nothing that holds it can hinder: was its storage resized?"""
        address, memory = self.addresses[number], self._memory[number]
        return address != 0 and not 0 <= address - memory.data_ptr() < memory.nbytes()
