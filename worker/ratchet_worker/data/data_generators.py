"""Finds and saves generators that a data set, ``augment``, ``collate_fn``, a sampler, a loader or a stream holds itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from ratchet_worker.data.generator_positions import Point
from ratchet_worker.state.rng import GeneratorState, is_generator, process_generators

_MAX_ITEMS: Final = 100  # items of a container that is searched: samples do not hold generators
_MAX_OBJECTS: Final = 10_000  # objects
_SESSION: Final = "ratchet_worker.session.session"  # what it holds, the hook's generator too, is saved separately
_MARKS: Final = "marks"  # cannot be a path: paths begin with a root
_PLAIN: Final = (str, bytes, int, float, complex, type, ModuleType, torch.Tensor, np.ndarray)


class OwnGenerators:
    """Finds and saves the generators that the objects ``roots`` hold in attributes, small containers and closures, by a path
    such as ``dataset.rng`` or ``dataset.rngs[0]``."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = dict(roots)
        self._epoch_start_states: dict[str, Any] | None = None

    def find(self) -> dict[str, Any]:
        """Return the generators by path. Each call searches again: some are created when they are first drawn from."""
        return {path: item for path, item in reachable(self.roots) if is_generator(item)}

    def begin(self, *, is_repeat: bool) -> None:
        """Begin an epoch. Until ``end``, ``states`` returns the generators' states at the beginning of this epoch. ``is_repeat``:
        the epoch has begun before. If the states at its beginning are known, the generators are then set back to them."""
        if is_repeat and self._epoch_start_states is not None:
            self._restore(self._epoch_start_states)
        else:
            self._epoch_start_states = self._current_states()

    def end(self) -> None:
        """End the epoch: ``states`` returns the current states again."""
        self._epoch_start_states = None

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Context manager: restore the states of these generators at the end of the block."""
        states = self._current_states()
        try:
            yield
        finally:
            self._restore(states)

    def states(self) -> dict[str, Any]:
        """Return the generators' states by path: the current ones, or between ``begin`` and ``end`` those of the epoch's
        beginning."""
        return self._current_states() if self._epoch_start_states is None else self._epoch_start_states

    def load(self, states: Mapping[str, Any]) -> list[str]:
        """Set the generators to ``states``, by path. Returns sentences about generators that only ``states`` or only the objects
        have."""
        found = self._restore(states)
        self.end()
        told = [
            f"{path} is no generator when training begins, and was one" for path in sorted(states.keys() - found.keys())
        ]
        told += [
            f"the generator {path} starts again: the checkpoint has none"
            for path in sorted(found.keys() - states.keys())
        ]
        return told

    def _restore(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Set the generators that ``states`` has to these states, and return all generators found now, by path."""
        found = self.find()
        for path in found.keys() & states.keys():
            GeneratorState(found[path]).load_state_dict(states[path])
        return found

    def _current_states(self) -> dict[str, Any]:
        """Return the generators' current states, by path."""
        return {path: GeneratorState(item).state_dict() for path, item in self.find().items()}


class StreamGenerators(OwnGenerators):
    """The generators that a ``TrainStream`` holds. ``marks``: points (``Point``) at certain batches, by name; they are saved with
    the generators' states. ``restores_itself``: whether the stream has ``load_state_dict``."""

    def __init__(self, roots: Mapping[str, Any], *, restores_itself: bool) -> None:
        super().__init__(roots)
        self.marks: dict[str, Point] = {}
        # Its ``load_state_dict`` may create its generators again.
        self._restores_itself = restores_itself
        self._pending_states: Mapping[str, Any] | None = None

    def states(self) -> dict[str, Any]:
        """Return the generators' states by path, and the points in ``marks`` under a key of their own. If states are kept for
        ``after_move``, returns these instead of the current ones."""
        own = dict(super().states() if self._pending_states is None else self._pending_states)
        return {**own, _MARKS: {name: mark.state() for name, mark in self.marks.items()}} if self.marks else own

    def load(self, states: Mapping[str, Any]) -> list[str]:
        """Load the generators' states and ``marks`` from ``states``; returns sentences as ``OwnGenerators.load`` does. If the
        stream restores itself, the generators are not set yet: their states are kept for ``after_move``, and the result is
        empty."""
        self.marks = {name: Point.from_state(mark) for name, mark in states.get(_MARKS, {}).items()}
        own = {path: state for path, state in states.items() if path != _MARKS}
        if not self._restores_itself:
            return super().load(own)
        self._pending_states = own
        return []

    def begin(self, *, is_repeat: bool) -> None:
        """Begin an epoch like ``OwnGenerators.begin``; does nothing for a stream that restores itself."""
        if not self._restores_itself:
            super().begin(is_repeat=is_repeat)

    def before_move(self) -> None:
        """Keep the generators' present states for ``after_move``, unless states are kept already. Does nothing if the stream does
        not restore itself."""
        if self._restores_itself and self._pending_states is None:
            self._pending_states = super().states()

    def after_move(self) -> list[str]:
        """Set the generators to the states kept for the move, if any. Returns a sentence for each kept state whose generator does
        not exist any more."""
        states, self._pending_states = self._pending_states, None
        if states is None:
            return []
        return [f"{path} is no generator any more" for path in sorted(states.keys() - self._restore(states).keys())]


def for_data(data: Any) -> OwnGenerators:
    """Return ``data.own_generators``, the generators inside training data; without that attribute, an object that holds none."""
    found = getattr(data, "own_generators", None)
    return found if isinstance(found, OwnGenerators) else OwnGenerators({})


def reachable(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) for the ``roots`` and for what they hold, breadth first and each object once. Some objects are left
    out, such as tensors, plain values and the process-wide generators."""
    # Holds the objects, so that no id() is reused meanwhile.
    seen: dict[int, Any] = {id(item): item for item in process_generators()}
    waiting = deque(roots.items())
    while waiting and len(seen) < _MAX_OBJECTS:
        path, item = waiting.popleft()
        if item is None or isinstance(item, _PLAIN) or id(item) in seen or type(item).__module__ == _SESSION:
            continue
        seen[id(item)] = item
        yield path, item
        if not is_generator(item):
            waiting.extend((f"{path}{name}", child) for name, child in _children(item))


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path suffix, object) for what ``item`` holds, such as the items of a small container, or attributes."""
    if isinstance(item, (list, tuple, dict)):
        if len(item) <= _MAX_ITEMS:
            # A copy: a thread of the data set may change the container meanwhile.
            pairs = list(item.items() if isinstance(item, dict) else enumerate(item))
            yield from ((f"[{key!r}]", child) for key, child in pairs)
    elif isinstance(item, MethodType):
        yield "", item.__self__
    elif isinstance(item, partial):
        yield from (("", item.func), (".args", item.args), (".keywords", item.keywords))
    elif isinstance(item, FunctionType):
        yield from ((f".{name}", child) for name, child in _function_state(item))
    else:
        yield from ((f".{name}", child) for name, child in list(getattr(item, "__dict__", {}).items()))


def _function_state(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for a function's closure variables and defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (("__defaults__", function.__defaults__), ("__kwdefaults__", function.__kwdefaults__))
