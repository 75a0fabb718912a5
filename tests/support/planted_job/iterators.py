"""Iterators, caches and files: what moves on when it is used."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property, lru_cache, singledispatch
from pathlib import Path
from typing import Any

import torch
from training import WIDTH, Piece, Value


class Count(Piece):
    def plant(self) -> None:
        self.calls = itertools.count()

    def move(self) -> Value:
        return next(self.calls) / 10


class Cycle(Piece):
    def plant(self) -> None:
        self.levels = itertools.cycle([0.1, 0.5, 0.9, -0.3])

    def move(self) -> Value:
        return next(self.levels)


class OfList(Piece):
    def plant(self) -> None:
        self.levels = iter([n / 10 for n in range(100)])

    def move(self) -> Value:
        return next(self.levels)


class OfRange(Piece):
    def plant(self) -> None:
        self.levels = iter(range(100))

    def move(self) -> Value:
        return next(self.levels) / 10


class Enumerated(Piece):
    def plant(self) -> None:
        self.levels = enumerate("abcdefgh" * 10)

    def move(self) -> Value:
        return next(self.levels)[0] / 10


class GeneratorObject(Piece):
    @staticmethod
    def falling() -> Iterator[float]:
        level = 1.0
        while True:
            level *= 0.9
            yield level

    def plant(self) -> None:
        self.levels = self.falling()

    def move(self) -> Value:
        return next(self.levels)


class GeneratorInList(GeneratorObject):
    def plant(self) -> None:
        self.sources = [self.falling()]

    def move(self) -> Value:
        return next(self.sources[0])


class GeneratorOfContainer(Piece):
    """A local list of a generator function changes; its numbers do not."""

    @staticmethod
    def values() -> Iterator[float]:
        kept: list[float] = []
        while True:
            kept.append(len(kept) / 10)
            yield sum(kept) / 10

    def plant(self) -> None:
        self.source = self.values()

    def move(self) -> Value:
        return next(self.source)


class Expression(Piece):
    def plant(self) -> None:
        self.levels = (n / 10 for n in range(100))

    def move(self) -> Value:
        return next(self.levels)


class Mapped(Piece):
    def plant(self) -> None:
        self.levels = map((0.1).__mul__, itertools.count())

    def move(self) -> Value:
        return next(self.levels)


class Zipped(Piece):
    def plant(self) -> None:
        self.levels = zip(itertools.count(), itertools.cycle([1.0, 2.0]), strict=False)

    def move(self) -> Value:
        number, scale = next(self.levels)
        return number * scale / 20


class Coroutine(Piece):
    """That is sent values."""

    @staticmethod
    def average() -> Any:
        mean = 0.0
        while True:
            mean = 0.9 * mean + 0.1 * (yield mean)

    def plant(self) -> None:
        self.mean = self.average()
        next(self.mean)

    def move(self) -> Value:
        return float(self.mean.send(1.0))


class OwnIterator(Piece):
    class Falling:
        def __init__(self) -> None:
            self.level = 1.0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> float:
            self.level *= 0.9
            return self.level

    def plant(self) -> None:
        self.levels = self.Falling()

    def move(self) -> Value:
        return next(self.levels)


class Cached(Piece):
    """``lru_cache`` of a method: the first answer stands."""

    def plant(self) -> None:
        self.calls = 0

        @lru_cache(maxsize=4)
        def level(number: int) -> float:
            self.calls += 1
            return self.calls / 10

        self.level = level

    def move(self) -> Value:
        return self.level(0) + self.level(self.calls % 7)


@cache
def first_weight(number: int, model: Any) -> torch.Tensor:
    """As the weight was when it was asked for first."""
    weight: torch.Tensor = model.layer.weight
    return weight.detach()[number].clone()


class CachedFunction(Piece):
    """A module's function with a cache."""

    def move(self) -> Value:
        return first_weight(1, self)


class CachedProperty(Piece):
    """Computed from the weights when it is first asked for."""

    @cached_property
    def level(self) -> torch.Tensor:
        return self.layer.weight.detach()[1].clone()

    def plant(self) -> None:
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        return self.level if self.calls > 3 else 0.0


class Dispatch(Piece):
    """A function that is taught another type in training."""

    def plant(self) -> None:
        @singledispatch
        def level(value: Any) -> float:
            return 0.1

        self.level, self.calls = level, 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 4:
            self.level.register(int, lambda value: 0.9)
        return self.level(1)


class FilePosition(Piece):
    """A file that is read on."""

    def plant(self) -> None:
        path = Path("levels.txt")
        path.write_text("".join(f"{n / 10}\n" for n in range(100)))
        self.file = path.open()

    def move(self) -> Value:
        return float(self.file.readline())


class AppendedFile(Piece):
    """A file in the job's directory that grows."""

    def plant(self) -> None:
        self.path = Path("log.txt")

    def move(self) -> Value:
        with self.path.open("a") as file:
            file.write("x")
        return self.path.stat().st_size / 10


class Descriptor(Piece):
    """A descriptor in place of an attribute: the value lies in the descriptor, by object."""

    class Stored:
        def __init__(self) -> None:
            self.values: dict[int, float] = {}

        def __get__(self, item: Any, kind: Any) -> float:
            return self.values.get(id(item), 0.0)

        def __set__(self, item: Any, value: float) -> None:
            self.values[id(item)] = value

    level = Stored()

    def move(self) -> Value:
        with suppress(AttributeError):
            self.level = self.level + 0.1
        return self.level + torch.zeros(WIDTH)
