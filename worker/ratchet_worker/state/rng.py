"""Seeds the process-wide generators of a rank (torch, CUDA, numpy, ``random``), and captures and restores generators bit for
bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from pydantic import JsonValue

from ratchet_hooks.state.encode import Tensors, encode
from ratchet_hooks.state.rng import capture, capture_torch, restore, restore_torch
from ratchet_worker.state.generator_memory import GeneratorMemory

__all__ = [
    "Capture",
    "GeneratorState",
    "Seeds",
    "capture",
    "derive_seed",
    "fork_rng",
    "is_generator",
    "restore",
    "seed_all",
]


def derive_seed(seed: int, *parts: str | int, bits: int = 63) -> int:
    """Return a seed of ``bits`` bits (at most 64) that is a pure function of ``seed`` and ``parts``."""
    text = ":".join(str(p) for p in ("ratchet", seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - bits)


class Seeds(NamedTuple):
    """The seeds of a rank's process-wide generators: torch's, numpy's and Python's."""

    torch: int
    numpy: int
    python: int

    @staticmethod
    def for_rank(seed: int, rank: int) -> Seeds:
        """Return the seeds that follow from the job's ``seed`` and ``rank`` alone."""
        return Seeds(
            derive_seed(seed, "torch", rank),
            derive_seed(seed, "numpy", rank, bits=32),
            derive_seed(seed, "python", rank),
        )


def seed_all(seed: int, rank: int) -> None:
    """Seed the process-wide generators (torch with CUDA, numpy, ``random``) as a function of (seed, rank)."""
    seeds = Seeds.for_rank(seed, rank)
    torch.manual_seed(seeds.torch)
    np.random.seed(seeds.numpy)
    random.seed(seeds.python)


@contextmanager
def fork_rng(device: torch.device) -> Iterator[dict[str, Any]]:
    """On exit from this block, restore the global generators (torch on the CPU and on ``device``, numpy, ``random``) to their
    state on entry, which is also the block's value."""
    state = capture(device)
    try:
        yield state
    finally:
        restore(state, device)


class Capture:
    """Captures and encodes the state of the process-wide generators for each save, reusing what seldom changes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, GeneratorMemory()
        self._seen: object = None  # memory of numpy's and Python's generators at the last capture
        self._state: dict[str, Any] = {}
        self._facts: object = None
        self._data: JsonValue = None

    @contextmanager
    def fork(self) -> Iterator[dict[str, Any]]:
        """As ``fork_rng``. Parts of the block's value may be the same objects as before."""
        seen = self._memory.read()
        if seen is None or seen != self._seen:
            self._state = capture(self._device)
            self._seen = seen if self._memory.read() == seen else None  # another thread may have drawn meanwhile
        else:
            self._state = {**self._state, **capture_torch(self._device)}
        state = self._state
        try:
            yield state
        finally:
            unchanged = seen is not None and self._memory.read() == seen
            (restore_torch if unchanged else restore)(state, self._device)

    def encode(self, state: dict[str, Any]) -> tuple[Tensors, JsonValue]:
        """Return ``state``, a result of ``capture``, as named tensors and JSON, which may be the same object as before."""
        numpy, (version, words, gauss) = state["numpy"], state["python"]
        key = numpy["state"].get("key")
        if not isinstance(key, np.ndarray) or [*numpy["state"]] != ["key", "pos"] or key.dtype.str != "<u4":
            return encode(state, root="rng")  # not the bit generator that numpy has at its start
        own = [numpy[name] for name in numpy if name not in ("state", "gauss")]
        halves = [None if half is None else float(half).hex() for half in (numpy["gauss"], gauss)]
        facts = [*numpy, *own, *halves, key.shape, numpy["state"]["pos"], version, state["cuda"] is None]
        if facts != self._facts:
            self._data, self._facts = encode(state, root="rng")[1], facts
        tensors = {
            "torch": state["torch"],
            "cuda": state["cuda"],
            "numpy.state.key": torch.from_numpy(key.view(np.uint8)),
        }
        return {n: t for n, t in (tensors | {"python[1]": words}).items() if t is not None}, self._data


Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def process_generators() -> tuple[Generator, ...]:
    """Return the global CPU generators of the process, which ``capture`` saves: torch's, numpy's and Python's."""
    return torch.default_generator, np.random.mtrand._rand, random._inst


def is_generator(item: object) -> TypeGuard[Generator]:
    """True if ``item`` is a generator whose draws can be repeated, of torch, numpy or ``random``."""
    # SystemRandom has no state, and its draws cannot be repeated.
    return isinstance(item, Generator) and not isinstance(item, random.SystemRandom)


def _spawn_count(generator: np.random.Generator) -> int:
    """Return how many children the generator's seed sequence has spawned so far; 0 if that is not known."""
    # The next children depend on this number, and the generator's state does not contain it.
    return int(getattr(getattr(generator.bit_generator, "seed_seq", None), "n_children_spawned", 0))


class GeneratorState:
    """Adds ``state_dict`` and ``load_state_dict`` to a generator of torch, numpy (``Generator``, ``RandomState``) or
    ``random``."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, and for a ``Generator`` of numpy also its ``_spawn_count``."""
        if isinstance(self.generator, torch.Generator):
            return {"state": self.generator.get_state()}
        if isinstance(self.generator, np.random.RandomState):
            return {"state": self.generator.get_state(legacy=False)}
        if isinstance(self.generator, random.Random):
            return {"state": self.generator.getstate()}
        return {"state": self.generator.bit_generator.state, "spawned": _spawn_count(self.generator)}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the generator's saved state. A numpy generator's count of spawned children is never decreased: children spawned
        since the save stay counted."""
        if isinstance(self.generator, (torch.Generator, np.random.RandomState)):
            self.generator.set_state(state["state"])
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(state["state"])
        else:
            self.generator.bit_generator.state = state["state"]
            if (more := state.get("spawned", 0) - _spawn_count(self.generator)) > 0:
                self.generator.spawn(more)  # numpy cannot decrease the count: what an evaluation spawned stays counted
