"""Without a service no rank is seeded before its script. What the script has seeded before its Session stays as it is; the rest
is seeded by the Session, as a job's rank is. So a script's own seeds count wherever they stand, as in a job.

torch's is seen since it is another than the process's own, numpy's since its generator has been given one, that of ``random``
since more has become of it than what packages draw while they are imported.
"""

from __future__ import annotations

import os
import random
from typing import Any, Final

import numpy as np
import torch

from ratchet_worker.import_draws import only_drawn
from ratchet_worker.rng import Seeds

_TORCH: Final = torch.get_rng_state()
_OWN_SEED: Final = torch.initial_seed()
_GIVEN: Final = 2**32
"""A seed below it was given before this module was imported: the process's own is a random one of 53 bits or more."""


class _OwnRandom:
    """``random`` as nobody has seeded it. Python seeds it anew in a forked process."""

    def __init__(self) -> None:
        self.take()
        os.register_at_fork(after_in_child=self.take)

    def take(self) -> None:
        self.state = random.getstate()


_RANDOM: Final = _OwnRandom()


class ScriptSeeds:
    """Of a process, which may make one Session after the other. ``drawn``: from what the script has drawn before the first, and
    had not seeded it."""

    def __init__(self) -> None:
        self.drawn: list[str] = []
        self._torch = {_OWN_SEED} if _OWN_SEED >= _GIVEN else set[int]()
        self._random, self._random_is_own = _RANDOM.state, False
        self._first = True

    def seed_others(self, seed: int, rank: int) -> list[str]:
        """Seeds what the script has not seeded. Returns the names of what it has."""
        seeds, script = Seeds.of(seed, rank), list[str]()
        first, self._first = self._first, False
        if torch.initial_seed() not in self._torch:
            script.append("torch")
        else:
            if first and not torch.equal(torch.get_rng_state(), _TORCH):
                self.drawn.append("torch")
            torch.manual_seed(seeds.torch)
            self._torch.add(seeds.torch)
        numpys: Any = np.random.mtrand._rand._bit_generator
        if not isinstance(numpys, np.random.MT19937) or numpys.seed_seq is None:
            script.append("numpy")
        else:
            if first and not _as_made(numpys):
                self.drawn.append("numpy")
            # Not by ``seed``, which leaves no ``seed_seq``: the next Session would take it for the script's.
            np.random.set_state(np.random.RandomState(seeds.numpy).get_state(legacy=False))
        self._random_is_own = only_drawn(self._random, random.getstate())
        if not self._random_is_own:
            script.append("random")
        else:
            random.seed(seeds.python)
            self._random = random.getstate()
        return script

    def run_over(self) -> None:
        """What was drawn from ``random`` in a run that had seeded it is no seed of the script's."""
        if self._random_is_own:
            self._random, self._random_is_own = random.getstate(), False


def _as_made(numpys: Any) -> bool:
    """Has nothing been drawn from it?"""
    made, now = (one.state["state"] for one in (np.random.MT19937(numpys.seed_seq), numpys))
    return bool(made["pos"] == now["pos"] and np.array_equal(made["key"], now["key"]))
