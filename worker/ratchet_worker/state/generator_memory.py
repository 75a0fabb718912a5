"""Reads the memory of the process-wide generators of numpy and ``random``: their functions that return the state make hundreds of
numbers, which takes long after a step."""

from __future__ import annotations

import ctypes
import random
from typing import Any, Final

import numpy as np

_MT19937: Final = ctypes.c_uint32 * 625
"""The Mersenne Twister's 624 words and the position in them, which numpy stores after them and Python before them."""
_HEAD: Final = object.__basicsize__


class GeneratorMemory:
    """The memory of both generators. ``python_words``: a view of the words of Python's generator; None if this Python has another
    layout."""

    def __init__(self) -> None:
        self._numpy: Any = np.random.mtrand._rand
        self._python: Any = random._inst
        self._numpy_view: tuple[Any, Any] = (None, None)  # its bit generator, and that one's words
        self._is_numpy_known = _holds_half(np.random.RandomState(0))
        self.python_words = _python_words()

    @property
    def python_half(self) -> float | None:
        """The half of a pair of normal numbers that Python's generator has cached."""
        half: float | None = self._python.gauss_next
        return half

    def numpy_words(self) -> Any:
        """Return the state of numpy's generator as bytes, without the cached half of a pair of normal numbers: a view that stays
        valid, or text for another bit generator than numpy's first."""
        generator = self._numpy._bit_generator
        if generator is self._numpy_view[0]:
            return self._numpy_view[1]
        if type(generator) is not np.random.MT19937:  # user code gave numpy another one
            return repr(generator.state).encode()
        words = memoryview(_MT19937.from_address(generator.ctypes.state_address)).cast("B")
        self._numpy_view = generator, words
        return words

    def read(self) -> tuple[object, ...] | None:
        """Return values that are equal as long as both generators have the same state; None if that is not known."""
        if self.python_words is None or not self._is_numpy_known:
            return None
        half = self.python_half
        python = bytes(self.python_words), None if half is None else float(half).hex()
        return _own_memory(self._numpy), bytes(self.numpy_words()), *python


def _own_memory(generator: np.random.RandomState) -> bytes:
    """Return the bytes of numpy's object, which has the cached half of a pair, but not the words."""
    return ctypes.string_at(id(generator) + _HEAD, type(generator).__basicsize__ - _HEAD)


def _holds_half(generator: np.random.RandomState) -> bool:
    """True if the object's own memory shows the cached half of a pair: the second of two normal numbers changes only that."""
    generator.standard_normal()
    before = _own_memory(generator)
    generator.standard_normal()
    return _own_memory(generator) != before


def _python_words() -> Any:
    """Return a view of the memory of Python's own generator; None if this Python has another layout."""
    inst = random._inst
    if type(inst).__basicsize__ < _HEAD + ctypes.sizeof(_MT19937):
        return None
    view = _MT19937.from_address(id(inst) + _HEAD)
    place, *words = view
    return memoryview(view).cast("B") if (*words, place) == random.getstate()[1] else None
