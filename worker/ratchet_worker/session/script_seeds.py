"""Seeds a run without a service as a job's rank is seeded, except the generators that the script has seeded before."""

from __future__ import annotations

import ctypes
import os
import random
from typing import Any, Final

import numpy as np
import torch

from ratchet_worker.state.import_draws import is_only_drawn
from ratchet_worker.state.rng import Seeds

_TORCH: Final = torch.get_rng_state()
_PROCESS_SEED: Final = torch.initial_seed()
_MIN_RANDOM_SEED: Final = 2**32
"""A seed below this counts as set before this module was imported: the process's own is a random one of 53 bits or more."""
_NUMPY_WORDS: Final = 624
_MAX_NUMPY_BLOCKS: Final = 300_000
"""Blocks of ``_NUMPY_WORDS`` draws. A state of numpy's generator counts as set by the script if not even this many blocks lead
to it; to find that out takes one to four seconds, at each start of a script that sets the state."""


class _OwnRandom:
    """The state of ``random`` when this module was imported, or when this process was forked."""

    def __init__(self) -> None:
        self.record_state()
        os.register_at_fork(after_in_child=self.record_state)

    def record_state(self) -> None:
        """Record the current state of ``random``."""
        self.state = random.getstate()


_RANDOM: Final = _OwnRandom()


class ScriptSeeds:
    """Seeds, for each run, the generators that the script has not seeded. ``drawn``: those of torch and numpy that the script
    used unseeded before the first run."""

    def __init__(self) -> None:
        self.drawn: list[str] = []
        self._torch = {_PROCESS_SEED} if _PROCESS_SEED >= _MIN_RANDOM_SEED else set[int]()
        self._random, self._random_is_own = _RANDOM.state, False
        self._numpy: Any = None  # numpy's state from which the draws continue; None: the one from its seed
        self._numpy_is_own = False
        self._first = True

    def seed_others(self, seed: int, rank: int) -> list[str]:
        """Seed the generators that the script has not seeded, as a job's rank is seeded. Return the names of the script-seeded
        ones."""
        seeds, script = Seeds.for_rank(seed, rank), list[str]()
        first, self._first = self._first, False
        if torch.initial_seed() not in self._torch:
            script.append("torch")
        else:
            if first and not torch.equal(torch.get_rng_state(), _TORCH):
                self.drawn.append("torch")
            torch.manual_seed(seeds.torch)
            self._torch.add(seeds.torch)
        numpys: Any = np.random.mtrand._rand._bit_generator
        self._numpy_is_own = _is_unseeded(numpys, self._numpy)
        if not self._numpy_is_own:
            script.append("numpy")
        else:
            if first and not _is_undrawn(numpys):
                self.drawn.append("numpy")
            # Not with ``seed``, which leaves no ``seed_seq``: the next Session would take it for the script's seed.
            np.random.set_state(np.random.RandomState(seeds.numpy).get_state(legacy=False))
            self._numpy = numpys.state
        self._random_is_own = is_only_drawn(self._random, random.getstate())
        if not self._random_is_own:
            script.append("random")
        else:
            random.seed(seeds.python)
            self._random = random.getstate()
        return script

    def on_run_end(self) -> None:
        """Record the states that the run's draws have led to, so that they do not count as the script's seeds."""
        if self._random_is_own:
            self._random, self._random_is_own = random.getstate(), False
        numpys: Any = np.random.mtrand._rand._bit_generator
        if self._numpy_is_own and isinstance(numpys, np.random.MT19937):
            self._numpy = numpys.state
        self._numpy_is_own = False


def _is_unseeded(numpys: Any, before: Any) -> bool:
    """True if fewer than ``_MAX_NUMPY_BLOCKS`` blocks of draws lead from the state ``before`` (None: the initial state) to the
    current one; False for a generator other than MT19937, or without a seed sequence."""
    seed: Any = numpys.seed_seq if isinstance(numpys, np.random.MT19937) else None
    if seed is None:
        return False
    probe: Any = np.random.MT19937(seed)
    if before is not None:
        probe.state = before
    words = memoryview((ctypes.c_uint32 * _NUMPY_WORDS).from_address(probe.ctypes.state_address)).cast("B")
    wanted = numpys.state["state"]["key"].tobytes()
    for _ in range(_MAX_NUMPY_BLOCKS):
        if words == wanted:
            return True
        probe.random_raw(_NUMPY_WORDS, output=False)
    return False


def _is_undrawn(numpys: Any) -> bool:
    """True if nothing has been drawn from numpy's bit generator since it was seeded."""
    made, now = (one.state["state"] for one in (np.random.MT19937(numpys.seed_seq), numpys))
    return bool(made["pos"] == now["pos"] and np.array_equal(made["key"], now["key"]))
