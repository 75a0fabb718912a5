"""Random generators, wherever an object can hold them."""

from __future__ import annotations

import random
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from training import WIDTH, Piece, Value


def made(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(WIDTH, generator=generator)


class InAttribute(Piece):
    def plant(self) -> None:
        self.noise = made()

    def move(self) -> Value:
        return drawn(self.noise)


class InDropout(Piece):
    """A layer of the user's that draws its masks from a generator of its own."""

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = made()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (torch.rand(x.shape, generator=self.source) > 0.3)

    def plant(self) -> None:
        self.masks = self.Masks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.masks(x))


class NumpyGenerator(Piece):
    def plant(self) -> None:
        self.noise = np.random.default_rng(2)

    def move(self) -> Value:
        return float(self.noise.normal())


class NumpyBitGenerator(Piece):
    def plant(self) -> None:
        self.noise = np.random.Generator(np.random.PCG64DXSM(2))

    def move(self) -> Value:
        return float(self.noise.normal(size=3).sum())


class NumpyMersenne(Piece):
    def plant(self) -> None:
        self.noise = np.random.Generator(np.random.MT19937(2))

    def move(self) -> Value:
        return float(self.noise.standard_normal(dtype=np.float32))


class NumpyPhilox(Piece):
    def plant(self) -> None:
        self.source = np.random.Philox(7)
        self.noise = np.random.Generator(self.source)

    def move(self) -> Value:
        return float(self.noise.random())


class RandomState(Piece):
    """An odd number of draws leaves a half of a pair of Gaussians inside."""

    def plant(self) -> None:
        self.noise = np.random.RandomState(3)

    def move(self) -> Value:
        return float(self.noise.randn())


class SeedSequence(Piece):
    """Spawns a child for every step."""

    def plant(self) -> None:
        self.seeds = np.random.SeedSequence(5)

    def move(self) -> Value:
        (child,) = self.seeds.spawn(1)
        return float(np.random.default_rng(child).random())


class Spawning(Piece):
    """A generator whose children are counted."""

    def plant(self) -> None:
        self.noise = np.random.default_rng(5)

    def move(self) -> Value:
        (child,) = self.noise.spawn(1)
        return float(child.random())


class PythonRandom(Piece):
    def plant(self) -> None:
        self.noise = random.Random(3)

    def move(self) -> Value:
        return self.noise.gauss(0, 1)


class OwnRandom(Piece):
    """A subclass with a number of its own."""

    class Lazy(random.Random):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.calls = 0

        def next(self) -> float:
            self.calls += 1
            return self.random() + self.calls / 10

    def plant(self) -> None:
        self.noise = self.Lazy(3)

    def move(self) -> Value:
        return self.noise.next()


class InList(Piece):
    def plant(self) -> None:
        self.noises = [made(1), made(2)]

    def move(self) -> Value:
        return drawn(self.noises[0]) + drawn(self.noises[1])


class InDict(Piece):
    def plant(self) -> None:
        self.noises = {("layer", 0): made(1), "numpy": np.random.default_rng(1)}

    def move(self) -> Value:
        return drawn(self.noises[("layer", 0)]) + float(self.noises["numpy"].normal())


@dataclass
class Noise:
    level: float = 1.0
    generator: torch.Generator = field(default_factory=made)
    drawn: list[float] = field(default_factory=list)


class InDataclass(Piece):
    def plant(self) -> None:
        self.noise = Noise()

    def move(self) -> Value:
        self.noise.level *= 0.9
        self.noise.drawn.append(float(drawn(self.noise.generator).sum()))
        return self.noise.level * self.noise.drawn[-1]


@dataclass(slots=True)
class Slotted:
    level: float
    generator: np.random.Generator


class InSlots(Piece):
    def plant(self) -> None:
        self.noise = Slotted(1.0, np.random.default_rng(4))

    def move(self) -> Value:
        self.noise.level *= 0.9
        return self.noise.level * float(self.noise.generator.normal())


@dataclass(frozen=True)
class Frozen:
    generator: torch.Generator


class InFrozenDataclass(Piece):
    def plant(self) -> None:
        self.noise = Frozen(made())

    def move(self) -> Value:
        return drawn(self.noise.generator)


Pair = namedtuple("Pair", ["torchs", "numpys"])


class InNamedTuple(Piece):
    def plant(self) -> None:
        self.noise = Pair(made(), np.random.default_rng(4))

    def move(self) -> Value:
        return drawn(self.noise.torchs) + float(self.noise.numpys.normal())


class BehindProperty(Piece):
    class Source:
        def __init__(self) -> None:
            self.__generator = made()

        @property
        def value(self) -> torch.Tensor:
            return drawn(self.__generator)

    def plant(self) -> None:
        self.source = self.Source()

    def move(self) -> Value:
        return self.source.value


class InPartial(Piece):
    def plant(self) -> None:
        self.draw = partial(torch.randn, WIDTH, generator=made())

    def move(self) -> Value:
        return self.draw()


class InBoundMethod(Piece):
    class Source:
        def __init__(self) -> None:
            self.generator = np.random.default_rng(8)

        def draw(self) -> float:
            return float(self.generator.normal())

    def plant(self) -> None:
        self.draw = self.Source().draw

    def move(self) -> Value:
        return self.draw()


class BuiltinMethod(Piece):
    """The bound method of a generator itself."""

    def plant(self) -> None:
        self.draw = np.random.default_rng(8).normal

    def move(self) -> Value:
        return float(self.draw())


class RandomMethod(Piece):
    def plant(self) -> None:
        self.draw = random.Random(4).random

    def move(self) -> Value:
        return self.draw()


class InClosure(Piece):
    def plant(self) -> None:
        generator = made()
        self.draw: Callable[[], torch.Tensor] = lambda: drawn(generator)

    def move(self) -> Value:
        return self.draw()


class InDefault(Piece):
    def plant(self) -> None:
        def draw(generator: torch.Generator = made()) -> torch.Tensor:
            return drawn(generator)

        self.draw = draw

    def move(self) -> Value:
        return self.draw()


class OnFunction(Piece):
    def plant(self) -> None:
        def draw() -> torch.Tensor:
            return drawn(draw.generator)  # type: ignore[attr-defined]

        draw.generator = made()  # type: ignore[attr-defined]
        self.draw = draw

    def move(self) -> Value:
        return self.draw()


class ByCallableObject(Piece):
    class Draw:
        def __init__(self) -> None:
            self.generator = made()

        def __call__(self) -> torch.Tensor:
            return drawn(self.generator)

    def plant(self) -> None:
        self.draw = self.Draw()

    def move(self) -> Value:
        return self.draw()


class BehindWeakReference(Piece):
    """Held by a list elsewhere in the model, used through the reference."""

    class Source:
        def __init__(self) -> None:
            self.generator = made()

    def plant(self) -> None:
        self.sources = [self.Source()]
        self.reference = weakref.ref(self.sources[0])

    def move(self) -> Value:
        source = self.reference()
        assert source is not None
        return drawn(source.generator)


class InWeakDictionary(Piece):
    """By layer, as hooks of libraries keep their state."""

    def plant(self) -> None:
        self.sources: Any = weakref.WeakKeyDictionary({self.layer: made()})

    def move(self) -> Value:
        return drawn(self.sources[self.layer])


class InProxy(Piece):
    """A read-only view of a dictionary."""

    def plant(self) -> None:
        self.sources = MappingProxyType({"noise": made()})

    def move(self) -> Value:
        return drawn(self.sources["noise"])


class InGeneratorFunction(Piece):
    """A local variable of a generator function that is under way."""

    @staticmethod
    def values() -> Iterator[torch.Tensor]:
        generator = made()
        while True:
            yield drawn(generator)

    def plant(self) -> None:
        self.source = self.values()

    def move(self) -> Value:
        return next(self.source)


class Replaced(Piece):
    """A new generator is made every fourth time."""

    def plant(self) -> None:
        self.calls, self.noise = 0, made()

    def move(self) -> Value:
        self.calls += 1
        if self.calls % 4 == 0:
            self.noise = made(self.calls)
        return drawn(self.noise)


class Shared(Piece):
    """One generator under two names in two objects."""

    class Source:
        def __init__(self, generator: torch.Generator) -> None:
            self.generator = generator

    def plant(self) -> None:
        self.noise = made()
        self.sources = [self.Source(self.noise), self.Source(self.noise)]

    def move(self) -> Value:
        return drawn(self.sources[0].generator) + drawn(self.sources[1].generator) * drawn(self.noise)


class SharedLate(Piece):
    """Two objects share a generator that training made."""

    def plant(self) -> None:
        self.left: torch.Generator | None = None
        self.right: torch.Generator | None = None

    def move(self) -> Value:
        if self.left is None or self.right is None:
            self.left = self.right = made()
        return drawn(self.left) + 2 * drawn(self.right)
