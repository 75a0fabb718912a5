"""Comparison of objects, dictionaries and tensors with what they were at the last save.

A save makes names, plans and JSON only when something changed, because the training waits meanwhile. Everything here uses
public Python and torch.
"""

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
    """Remembers which objects are in a sequence. ``matches`` is True while a sequence has the same objects in the same order.

    Constants, modules, parameters and other subclasses of tensors are referenced, so they stay in memory, and so do objects that
    do not support weak references. (``torch.utils.swap_tensors`` refuses tensors with weak references.) Lists, dictionaries and
    tuples that are not constant may hold tensors, so they are not referenced at all, and only their ``id`` is compared. A caller
    must check their contents separately: they change without becoming another object. All other objects are referenced weakly.
    So a tensor that training replaces in every step does not stay in memory until the next save.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        listed = [*objects]
        self._ids = [*map(id, listed)]
        self._collected: list[object] = []
        kinds = {kind: _kind(kind) for kind in {*map(type, listed)}}
        self._strong_references = [one for one in listed if kinds[type(one)] == "referenced" or is_constant(one)]
        self._weak_references = [
            weakref.ref(one, self._collected.append) for one in listed if kinds[type(one)] == "weak"
        ]

    def matches(self, objects: Iterable[Any]) -> bool:
        """True if ``objects`` are the same objects, in the same order, and none of the earlier ones has been freed. Of lists,
        dictionaries and tuples that are not constant only the ``id`` is compared: one that was freed is not noticed."""
        return not self._collected and [*map(id, objects)] == self._ids


def _kind(kind: type) -> Literal["referenced", "weak", "open"]:
    """Return how ``Same`` keeps values of this type: referenced, by a weak reference, or by ``id`` only (``open``). Types that do
    not support weak references, such as numpy's scalars, are referenced."""
    if issubclass(kind, _OPEN):
        return "open"
    special = issubclass(kind, torch.Tensor) and kind is not torch.Tensor
    return "referenced" if special or issubclass(kind, nn.Module) or not kind.__weakrefoffset__ else "weak"


def is_constant(value: object) -> bool:
    """True if nothing in ``value`` can change: it is an ``int``, ``float``, ``bool``, ``str``, None, or a tuple of these."""
    return type(value) in CONSTANTS or (isinstance(value, tuple) and all(map(is_constant, value)))


class Contents:
    """Remembers the keys and values of dictionaries, by identity and order. References to them are kept as in ``Same``."""

    def __init__(self, dictionaries: Iterable[Mapping[Any, Any]]) -> None:
        held = [*dictionaries]
        self._lengths = [*map(len, held)]
        self._keys, self._values = Same(chain.from_iterable(held)), Same(_values(held))

    def matches(self, dictionaries: Iterable[Mapping[Any, Any]]) -> bool:
        """True if ``dictionaries`` have the same key and value objects as the earlier ones, in the same order. Values that are
        changed in place are not detected."""
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
    """Remembers the type, dtype, device, shape, strides and ``requires_grad`` of tensors, whether they are inference tensors, and
    whether torch defers a conjugation or negation. Elements and memory addresses are not compared."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """If one of the tensors has another layout than strided, or two are the same object, ``matches`` always returns False."""
        usual = all(tensor.layout is torch.strided for tensor in tensors)
        self._forms = _forms(tensors) if usual and len({*map(id, tensors)}) == len(tensors) else None

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if there are as many tensors as before, and each has the same properties as the earlier tensor at its place.
        Always False for the earlier tensors that ``__init__`` names."""
        if self._forms is None or not all(tensor.layout is torch.strided for tensor in tensors):
            return False
        return _forms(tensors) == self._forms


def _forms(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Return the properties that ``Forms`` compares, as one list per property."""
    tensor = torch.Tensor
    looks = (_FORM, tensor.stride, tensor.is_inference, tensor.is_conj, tensor.is_neg)
    return [[*map(look, tensors)] for look in looks]
