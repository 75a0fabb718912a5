"""Every generator a rank draws from (torch on CPU and CUDA, numpy, ``random``): seeded per rank, restored bit for bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from pydantic import JsonValue

from ratchet_hooks.codec import Tensors, encode
from ratchet_hooks.generators import capture, restore

__all__ = [
    "Capture",
    "GeneratorState",
    "Seeds",
    "capture",
    "derive_seed",
    "forked",
    "is_generator",
    "restore",
    "seed_all",
]


def derive_seed(seed: int, *parts: str | int, bits: int = 63) -> int:
    """A seed of ``bits`` bits that is a pure function of ``seed`` and ``parts``: SHA-256 of their text, cut."""
    text = ":".join(str(p) for p in ("ratchet", seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - bits)


class Seeds(NamedTuple):
    """Of a rank's generators."""

    torch: int
    numpy: int
    python: int

    @staticmethod
    def of(seed: int, rank: int) -> Seeds:
        return Seeds(
            derive_seed(seed, "torch", rank),
            derive_seed(seed, "numpy", rank, bits=32),
            derive_seed(seed, "python", rank),
        )


def seed_all(seed: int, rank: int) -> None:
    """Seed all generators of this process as a function of (seed, rank). ``torch.manual_seed`` seeds every CUDA device too."""
    seeds = Seeds.of(seed, rank)
    torch.manual_seed(seeds.torch)
    np.random.seed(seeds.numpy)
    random.seed(seeds.python)


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """What is drawn inside leaves no trace: all generators are as before afterwards, also after an exception."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)


class Capture:
    """What ``capture`` gives, as ``ratchet_hooks.codec`` has it, from save to save: what is no tensor is mostly what it was."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._facts: object = None
        self._data: JsonValue = None

    def encoded(self) -> tuple[Tensors, JsonValue]:
        """Named tensors and JSON; the same object as long as it says the same."""
        state = capture(self._device)
        numpy, (version, words, gauss) = state["numpy"], state["python"]
        key = numpy["state"].get("key")
        if not isinstance(key, np.ndarray) or [*numpy["state"]] != ["key", "pos"] or key.dtype.str != "<u4":
            return encode(state, where="rng")  # not numpy's own at its start
        own = [numpy[name] for name in numpy if name not in ("state", "gauss")]
        halves = [None if half is None else float(half).hex() for half in (numpy["gauss"], gauss)]
        facts = [*numpy, *own, *halves, key.shape, numpy["state"]["pos"], version, state["cuda"] is None]
        if facts != self._facts:
            self._data, self._facts = encode(state, where="rng")[1], facts
        tensors = {
            "torch": state["torch"],
            "cuda": state["cuda"],
            "numpy.state.key": torch.from_numpy(key.view(np.uint8)),
        }
        return {n: t for n, t in (tensors | {"python[1]": words}).items() if t is not None}, self._data


Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def process_wide() -> tuple[Generator, ...]:
    """The generators of the process, which are saved by themselves (``capture``)."""
    return torch.default_generator, np.random.mtrand._rand, random._inst


def is_generator(item: object) -> TypeGuard[Generator]:
    # SystemRandom has no state, and its draws cannot be repeated.
    return isinstance(item, Generator) and not isinstance(item, random.SystemRandom)


def _spawned(generator: np.random.Generator) -> int:
    """How many children ``spawn`` has given out: the next ones depend on it, and the state does not tell."""
    return int(getattr(getattr(generator.bit_generator, "seed_seq", None), "n_children_spawned", 0))


class GeneratorState:
    """Gives a generator of torch, numpy (``Generator``, ``RandomState``) or ``random`` the ``state_dict`` it lacks."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self._generator, torch.Generator):
            return {"state": self._generator.get_state()}
        if isinstance(self._generator, np.random.RandomState):
            return {"state": self._generator.get_state(legacy=False)}
        if isinstance(self._generator, random.Random):
            return {"state": self._generator.getstate()}
        return {"state": self._generator.bit_generator.state, "spawned": _spawned(self._generator)}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        if isinstance(self._generator, (torch.Generator, np.random.RandomState)):
            self._generator.set_state(state["state"])
        elif isinstance(self._generator, random.Random):
            self._generator.setstate(state["state"])
        else:
            self._generator.bit_generator.state = state["state"]
            if (more := state.get("spawned", 0) - _spawned(self._generator)) > 0:
                self._generator.spawn(more)  # numpy cannot count back: what an evaluation has spawned stays counted
