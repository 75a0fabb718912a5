"""Where the generators that data may draw from stand at one moment: the process-wide ones, and those that a stream holds."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ratchet_hooks.codec import encode
from ratchet_worker.rng import Generator, GeneratorState, derive_seed
from ratchet_worker.snapshot import digest


@dataclass(frozen=True)
class Point:
    """``python`` is as ``random`` has it: its conversion waits for ``state``. ``own``: by the path of attributes."""

    python: Any
    legacy: Any  # numpy's
    cpu: torch.Tensor
    cuda: torch.Tensor | None
    own: Mapping[str, Any]

    def state(self) -> dict[str, Any]:
        """What ``codec`` takes; the inverse of ``of``."""
        version, words, gauss = self.python
        words = torch.frombuffer(array("q", words), dtype=torch.int64)
        process = {"torch": self.cpu, "cuda": self.cuda, "numpy": self.legacy, "python": (version, words, gauss)}
        return {"process": process, "own": dict(self.own)}

    @staticmethod
    def of(state: Mapping[str, Any]) -> Point:
        process = state["process"]
        version, words, gauss = process["python"]
        python = (version, tuple(words.tolist()), gauss)
        return Point(python, process["numpy"], process["torch"], process["cuda"], state["own"])

    def put(self, own: Mapping[str, Generator]) -> None:
        """All generators stand here. ``own``: those that the stream holds now; what only one side has stays as it is."""
        random.setstate(self.python)
        np.random.set_state(self.legacy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and _on_cuda():
            torch.cuda.set_rng_state(self.cuda)
        for path in own.keys() & self.own.keys():
            GeneratorState(own[path]).load_state_dict(self.own[path])


def here(own: Mapping[str, Generator]) -> Point:
    """This moment. About 100 microseconds, most of them numpy's."""
    return Point(
        random.getstate(),
        np.random.get_state(legacy=False),
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if _on_cuda() else None,
        {path: GeneratorState(item).state_dict() for path, item in own.items()},
    )


def branch(epoch: int) -> Point:
    """Where the process-wide generators would stand if they were seeded by where they stand now, and by ``epoch``."""
    tensors, facts = encode(here({}).state()["process"], where="generators")
    seeds = (digest(tensors.values()), repr(facts), epoch)
    with kept():
        random.seed(derive_seed(0, "python", *seeds))
        np.random.seed(derive_seed(0, "numpy", *seeds, bits=32))
        torch.default_generator.manual_seed(derive_seed(0, "torch", *seeds))
        if _on_cuda():
            torch.cuda.manual_seed(derive_seed(0, "cuda", *seeds))
        return here({})


@contextmanager
def kept() -> Iterator[None]:
    """What is drawn from the process-wide generators inside, those of the rank's accelerator too, leaves no trace."""
    point = here({})
    try:
        yield
    finally:
        point.put({})


def _on_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
