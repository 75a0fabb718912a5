"""Are these the very same objects as before, and do they lie as they lay?"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards, dict_version

CONSTANTS: Final = (int, float, bool, str, type(None))
"""Small, and never changed."""
_HELD: Final = (*CONSTANTS, nn.Module, nn.Parameter)


class Same:
    """Told by the objects' numbers, and by that all of them are still there. Other tensors than parameters are held weakly: a
    training that replaces them in every step does not need the memory of two. (Parameters are held, since torch swaps none that
    has weak references, see ``torch.utils.swap_tensors``.)"""

    def __init__(self, objects: Iterable[Any]) -> None:
        listed = [*objects]
        self._ids = [*map(id, listed)]
        self._held = [one for one in listed if isinstance(one, _HELD)]
        self._gone: list[object] = []
        self._others = [weakref.ref(one, self._gone.append) for one in listed if not isinstance(one, _HELD)]

    def holds(self, objects: Iterable[Any]) -> bool:
        """The same ones in the same order, as many as before."""
        return not self._gone and [*map(id, objects)] == self._ids


class Versions:
    """What dictionaries hold, told by Python's own number of it: each change of any dictionary gives that one a number which no
    other has or had. So none of them, and nothing in them, is kept alive. What is in them is taken for the same as long as it is
    the same object under the same key, in the same order. Of plain ones alone: an ``OrderedDict`` is reordered unseen."""

    def __init__(self, dictionaries: Iterable[Mapping[Any, Any]]) -> None:
        self._numbers = _numbers(dictionaries)

    def hold(self, dictionaries: Iterable[Mapping[Any, Any]]) -> bool:
        """The same ones in the same order, as many as before, and nothing in them changed."""
        return _numbers(dictionaries) == self._numbers


def _numbers(dictionaries: Iterable[Any]) -> array[int]:
    return array("Q", map(dict_version, dictionaries))


class Forms:
    """Types, dtypes, devices, shapes, strides and ``requires_grad`` of tensors, and whether torch puts off a conjugation or
    negation: all that there is to say of one but its elements and where they lie. One look of torch's own, in C++."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are all dense, and no two of them the same object; else nothing is ever taken for the same."""
        self._count = len(tensors)
        self._guards: Any = None
        if all(tensor.layout is torch.strided for tensor in tensors):
            sizes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
            self._guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """As many as before, each like the one that was in its place."""
        return self._guards is not None and len(tensors) == self._count and bool(self._guards.check(*tensors))
