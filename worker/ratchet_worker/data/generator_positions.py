"""Records and restores the generators that data may draw from: the process-wide ones, and those that the data hold."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ratchet_hooks.state.encode import encode
from ratchet_worker.state.rng import Generator, GeneratorState, derive_seed
from ratchet_worker.state.snapshot import digest


@dataclass(frozen=True)
class Point:
    """The states of random number generators at one moment. ``cuda``: None if CUDA was not in use. ``own``: states of the
    generators that the data hold, by attribute path."""

    python: Any
    legacy: Any  # numpy's
    cpu: torch.Tensor
    cuda: torch.Tensor | None
    own: Mapping[str, Any]

    def state(self) -> dict[str, Any]:
        """Return this point as a value that ``ratchet_hooks.state.encode`` accepts; the inverse of ``from_state``."""
        version, words, gauss = self.python
        words = torch.frombuffer(array("q", words), dtype=torch.int64)
        process = {"torch": self.cpu, "cuda": self.cuda, "numpy": self.legacy, "python": (version, words, gauss)}
        return {"process": process, "own": dict(self.own)}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Point:
        """Return the point that ``state`` was made from; the inverse of ``state()``."""
        process = state["process"]
        version, words, gauss = process["python"]
        python = (version, tuple(words.tolist()), gauss)
        return Point(python, process["numpy"], process["torch"], process["cuda"], state["own"])

    def restore(self, own: Mapping[str, Generator]) -> None:
        """Set generators to the states of this point: the process-wide ones, and those in ``own`` (by path) whose state it has.
        The CUDA generator is set only if its state was recorded and CUDA is in use."""
        random.setstate(self.python)
        np.random.set_state(self.legacy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and _on_cuda():
            torch.cuda.set_rng_state(self.cuda)
        for path in own.keys() & self.own.keys():
            GeneratorState(own[path]).load_state_dict(self.own[path])


def current_point(own: Mapping[str, Generator]) -> Point:
    """Return the current states of the process-wide generators and of the generators in ``own``, by path."""
    return Point(
        random.getstate(),
        np.random.get_state(legacy=False),
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if _on_cuda() else None,
        {path: GeneratorState(item).state_dict() for path, item in own.items()},
    )


def branch(epoch: int) -> Point:
    """Return the states that the process-wide generators would have after seeding from their current states and ``epoch``."""
    tensors, facts = encode(current_point({}).state()["process"], root="generators")
    seeds = (digest(tensors.values()), repr(facts), epoch)
    with preserved():
        random.seed(derive_seed(0, "python", *seeds))
        np.random.seed(derive_seed(0, "numpy", *seeds, bits=32))
        torch.default_generator.manual_seed(derive_seed(0, "torch", *seeds))
        if _on_cuda():
            torch.cuda.manual_seed(derive_seed(0, "cuda", *seeds))
        return current_point({})


@contextmanager
def preserved() -> Iterator[None]:
    """Context manager: restore the process-wide generators, including the rank's CUDA generator, at the end of the block."""
    point = current_point({})
    try:
        yield
    finally:
        point.restore({})


def _on_cuda() -> bool:
    """True if this process has initialised CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
