"""Generators that a data set, ``augment``, ``collate_fn``, a sampler or a stream holds for itself: found and saved.

In the rank's own process they stand, at a step boundary, where the last batch left them: their state is all that a resume needs.
In a DataLoader's workers they are copies that nobody can ask: the resume report names them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from ratchet_worker.data.points import Point
from ratchet_worker.rng import GeneratorState, is_generator, process_wide

_LONGEST: Final = 100  # of a container that is looked into: samples are no place for generators
_MOST: Final = 10_000  # objects
_SESSION: Final = "ratchet_worker.session"  # what is behind one, the hook's generator too, is saved by itself
_MARKS: Final = "marks"  # no path: those begin with a root
_PLAIN: Final = (str, bytes, int, float, complex, type, ModuleType, torch.Tensor, np.ndarray)


class OwnGenerators:
    """Of the objects ``roots``, by the path of attributes at which each is found first, like ``dataset.rng``.

    Looked into are attributes, bound methods, ``partial``, closures, and containers of up to 100 items. Process-wide generators
    are the rank's, and not among them.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = dict(roots)
        self._begun: dict[str, Any] | None = None

    def find(self) -> dict[str, Any]:
        """Anew each time: some are made when they are first drawn from."""
        return {path: item for path, item in reachable(self.roots) if is_generator(item)}

    def begin(self, *, again: bool) -> None:
        """Of a stream that a resume reads from the beginning of an epoch: there it is, and until ``end`` ``states`` gives what
        stood here. ``again``: the epoch has begun before; its state comes back, if it is known."""
        if again and self._begun is not None:
            self._put(self._begun)
        else:
            self._begun = self._now()

    def end(self) -> None:
        self._begun = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is drawn inside leaves no trace, also after an exception."""
        states = self._now()
        try:
            yield
        finally:
            self._put(states)

    def states(self) -> dict[str, Any]:
        """By path; what ``codec`` takes."""
        return self._now() if self._begun is None else self._begun

    def load(self, states: Mapping[str, Any]) -> list[str]:
        """Put ``states`` back; sentences about those that only one side has. Raises what a generator says to another's state."""
        found = self._put(states)
        self.end()
        told = [
            f"{path} is no generator when training begins, and was one" for path in sorted(states.keys() - found.keys())
        ]
        told += [
            f"the generator {path} begins anew: the checkpoint has none"
            for path in sorted(found.keys() - states.keys())
        ]
        return told

    def _put(self, states: Mapping[str, Any]) -> dict[str, Any]:
        found = self.find()
        for path in found.keys() & states.keys():
            GeneratorState(found[path]).load_state_dict(states[path])
        return found

    def _now(self) -> dict[str, Any]:
        return {path: GeneratorState(item).state_dict() for path, item in self.find().items()}


class StreamGenerators(OwnGenerators):
    """Of a ``TrainStream``, which reads batches again to get where it was: with ``marks``, points to put in place there.

    ``followed``: the stream restores itself, and its generators may be made anew by it; so they are put in place by ``arrive``.
    """

    def __init__(self, roots: Mapping[str, Any], *, followed: bool) -> None:
        super().__init__(roots)
        self.marks: dict[str, Point] = {}
        self._followed = followed
        self._waiting: Mapping[str, Any] | None = None

    def states(self) -> dict[str, Any]:
        own = dict(super().states() if self._waiting is None else self._waiting)
        return {**own, _MARKS: {name: mark.state() for name, mark in self.marks.items()}} if self.marks else own

    def load(self, states: Mapping[str, Any]) -> list[str]:
        self.marks = {name: Point.of(mark) for name, mark in states.get(_MARKS, {}).items()}
        own = {path: state for path, state in states.items() if path != _MARKS}
        if not self._followed:
            return super().load(own)
        self._waiting = own
        return []

    def begin(self, *, again: bool) -> None:
        if not self._followed:
            super().begin(again=again)

    def leave(self) -> None:
        """The stream is about to be put elsewhere: ``arrive`` puts the generators back where they are, or where ``load`` wants
        them."""
        if self._followed and self._waiting is None:
            self._waiting = super().states()

    def arrive(self) -> list[str]:
        """The stream is where it was, and so are its generators from now on. Sentences about those that are missing."""
        states, self._waiting = self._waiting, None
        if states is None:
            return []
        return [f"{path} is no generator any more" for path in sorted(states.keys() - self._put(states).keys())]


def of(data: Any) -> OwnGenerators:
    """Those of ``data.own_generators``; none where a ``TrainData`` has nothing of the kind: its ``state_dict`` is all it has."""
    found = getattr(data, "own_generators", None)
    return found if isinstance(found, OwnGenerators) else OwnGenerators({})


def reachable(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Breadth first, each object once."""
    # Kept, so that no number of an object is given to another meanwhile.
    seen: dict[int, Any] = {id(item): item for item in process_wide()}
    waiting = deque(roots.items())
    while waiting and len(seen) < _MOST:
        path, item = waiting.popleft()
        if item is None or isinstance(item, _PLAIN) or id(item) in seen or type(item).__module__ == _SESSION:
            continue
        seen[id(item)] = item
        yield path, item
        if not is_generator(item):
            waiting.extend((f"{path}{name}", child) for name, child in _children(item))


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, (list, tuple, dict)):
        if len(item) <= _LONGEST:
            # A copy: a thread of the data set may change the container meanwhile.
            pairs = list(item.items() if isinstance(item, dict) else enumerate(item))
            yield from ((f"[{key!r}]", child) for key, child in pairs)
    elif isinstance(item, MethodType):
        yield "", item.__self__
    elif isinstance(item, partial):
        yield from (("", item.func), (".args", item.args), (".keywords", item.keywords))
    elif isinstance(item, FunctionType):
        yield from ((f".{name}", child) for name, child in _held(item))
    else:
        yield from ((f".{name}", child) for name, child in list(getattr(item, "__dict__", {}).items()))


def _held(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function keeps from call to call: variables around it, and defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (("__defaults__", function.__defaults__), ("__kwdefaults__", function.__kwdefaults__))
