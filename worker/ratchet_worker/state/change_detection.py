"""Quick checks of whether objects, dictionaries and tensors are those of the last save: training waits for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Literal

import torch
from torch import nn

CONSTANTS: Final = (int, float, bool, str, type(None))
"""Types of small values that never change."""
_OPEN: Final = (list, dict, tuple)


class Same:
    """Remembers the objects of a sequence, to recognise them later. Lists, dictionaries and tuples that are not constant are
    recognised only by ``id``, so the caller must check their contents."""

    def __init__(self, objects: Iterable[Any]) -> None:
        listed = [*objects]
        self._ids = [*map(id, listed)]
        self._collected: list[object] = []
        kinds = {kind: _kind(kind) for kind in {*map(type, listed)}}
        self._strong_references = [one for one in listed if kinds[type(one)] == "referenced" or is_constant(one)]
        # A tensor that training replaces in every step must not stay in memory until the next save.
        self._weak_references = [
            weakref.ref(one, self._collected.append) for one in listed if kinds[type(one)] == "weak"
        ]

    def matches(self, objects: Iterable[Any]) -> bool:
        """True if ``objects`` are the same objects in the same order, and no weakly referenced one was freed meanwhile."""
        return not self._collected and [*map(id, objects)] == self._ids


def _kind(kind: type) -> Literal["referenced", "weak", "open"]:
    """Return how ``Same`` keeps values of this type: referenced, by a weak reference, or by ``id`` only (``open``)."""
    if issubclass(kind, _OPEN):
        return "open"
    # ``torch.utils.swap_tensors`` refuses tensors with weak references.
    special = issubclass(kind, torch.Tensor) and kind is not torch.Tensor
    return "referenced" if special or issubclass(kind, nn.Module) or not kind.__weakrefoffset__ else "weak"


def is_constant(value: object) -> bool:
    """True if ``value`` is an ``int``, ``float``, ``bool``, ``str``, None, or a tuple of these: nothing in it can change."""
    return type(value) in CONSTANTS or (isinstance(value, tuple) and all(map(is_constant, value)))


class Contents:
    """Remembers the keys and values of dictionaries, by identity and order. References to them are kept as in ``Same``."""

    def __init__(self, dictionaries: Iterable[Mapping[Any, Any]]) -> None:
        held = [*dictionaries]
        self._lengths = [*map(len, held)]
        self._keys, self._values = Same(chain.from_iterable(held)), Same(_values(held))

    def matches(self, dictionaries: Iterable[Mapping[Any, Any]]) -> bool:
        """True if ``dictionaries`` have the same key and value objects as before, in the same order."""
        held = [*dictionaries]
        return (
            [*map(len, held)] == self._lengths
            and self._values.matches(_values(held))
            and self._keys.matches(chain.from_iterable(held))
        )


def _values(dictionaries: Iterable[Mapping[Any, Any]]) -> Iterable[Any]:
    """Return the values of all dictionaries, in order."""
    return chain.from_iterable(one.values() for one in dictionaries)


_FORM: Final = attrgetter("__class__", "dtype", "device", "shape", "requires_grad")


class Forms:
    """Remembers properties of tensors other than elements and addresses, such as dtype, shape, strides and ``requires_grad``."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """If one of the tensors has another layout than strided, or two are the same object, ``matches`` always returns False."""
        usual = all(tensor.layout is torch.strided for tensor in tensors)
        self._forms = _forms(tensors) if usual and len({*map(id, tensors)}) == len(tensors) else None

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if the tensors have the same properties as those passed to ``__init__``, in the same order. False if one of
        ``tensors`` is not strided, and in the cases described at ``__init__``."""
        if self._forms is None or not all(tensor.layout is torch.strided for tensor in tensors):
            return False
        return _forms(tensors) == self._forms


def _forms(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Return the properties that ``Forms`` compares, as one list per property."""
    tensor = torch.Tensor
    looks = (_FORM, tensor.stride, tensor.is_inference, tensor.is_conj, tensor.is_neg)
    return [[*map(look, tensors)] for look in looks]
