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
    """The identity of objects in a sequence. ``holds`` is true while the sequence has the same objects in the same order.

    Constants, modules and parameters are referenced. All others are referenced weakly, so that a tensor that a training
    replaces in every step does not stay in memory until the next save. (``torch.utils.swap_tensors`` refuses tensors with weak
    references, so parameters and other subclasses of tensors are referenced.) Of lists, dictionaries and tuples, which may hold
    tensors, only the ``id`` is compared, unless a tuple is constant. A caller must look into them anyway: they change without
    becoming another object."""

    def __init__(self, objects: Iterable[Any]) -> None:
        listed = [*objects]
        self._ids = [*map(id, listed)]
        self._gone: list[object] = []
        kinds = {kind: _kind(kind) for kind in {*map(type, listed)}}
        self._held = [one for one in listed if kinds[type(one)] == "referenced" or is_constant(one)]
        self._others = [weakref.ref(one, self._gone.append) for one in listed if kinds[type(one)] == "weak"]

    def holds(self, objects: Iterable[Any]) -> bool:
        """Whether these are the same objects in the same order."""
        return not self._gone and [*map(id, objects)] == self._ids


def _kind(kind: type) -> Literal["referenced", "weak", "open"]:
    """How ``Same`` keeps the identity of values of this type. Types without weak references, such as numpy's scalars, are
    referenced."""
    if issubclass(kind, _OPEN):
        return "open"
    special = issubclass(kind, torch.Tensor) and kind is not torch.Tensor
    return "referenced" if special or issubclass(kind, nn.Module) or not kind.__weakrefoffset__ else "weak"


def is_constant(value: object) -> bool:
    """Whether nothing in ``value`` can change: a number, a string, None, or a tuple of such."""
    return type(value) in CONSTANTS or (isinstance(value, tuple) and all(map(is_constant, value)))


class Contents:
    """The keys and values of dictionaries, by identity and order. What it references is told at ``Same``."""

    def __init__(self, dictionaries: Iterable[Mapping[Any, Any]]) -> None:
        held = [*dictionaries]
        self._lengths = [*map(len, held)]
        self._keys, self._values = Same(chain.from_iterable(held)), Same(_values(held))

    def hold(self, dictionaries: Iterable[Mapping[Any, Any]]) -> bool:
        """Whether the dictionaries have the same keys and values in the same order."""
        held = [*dictionaries]
        return (
            [*map(len, held)] == self._lengths
            and self._values.holds(_values(held))
            and self._keys.holds(chain.from_iterable(held))
        )


def _values(dictionaries: Iterable[Mapping[Any, Any]]) -> Iterable[Any]:
    return chain.from_iterable(one.values() for one in dictionaries)


_FORM: Final = attrgetter("__class__", "dtype", "device", "shape", "requires_grad")


class Forms:
    """All properties of tensors but their elements and their memory: type, dtype, device, shape, strides, ``requires_grad``,
    whether they are inference tensors, and whether torch defers a conjugation or negation."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors that are not dense are never equal to anything, nor are two that are the same object."""
        usual = all(tensor.layout is torch.strided for tensor in tensors)
        self._forms = _forms(tensors) if usual and len({*map(id, tensors)}) == len(tensors) else None

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether there are as many tensors, each with the form of the one that was at its place."""
        if self._forms is None or not all(tensor.layout is torch.strided for tensor in tensors):
            return False
        return _forms(tensors) == self._forms


def _forms(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    tensor = torch.Tensor
    looks = (_FORM, tensor.stride, tensor.is_inference, tensor.is_conj, tensor.is_neg)
    return [[*map(look, tensors)] for look in looks]
