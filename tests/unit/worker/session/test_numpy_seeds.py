"""How numpy's generator counts before a Session: as seeded by the script, or as drawn from without a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ratchet_worker.session import script_seeds
from ratchet_worker.session.script_seeds import ScriptSeeds
from ratchet_worker.state import rng


@pytest.fixture(autouse=True)
def generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Numpy's is as in a new process; to search for a state that was set takes less time."""
    monkeypatch.setattr(script_seeds, "_MAX_NUMPY_BLOCKS", 5000)
    own: Any = np.random.mtrand._rand._bit_generator
    with rng.fork_rng(torch.device("cpu")):
        np.random.set_bit_generator(np.random.MT19937())
        yield
        np.random.set_bit_generator(own)


def seeds_numpy(seeds: ScriptSeeds) -> bool:
    before = np.random.get_state()[1].tobytes()
    is_script = "numpy" in seeds.seed_others(3, 0)
    assert is_script == (np.random.get_state()[1].tobytes() == before)
    return not is_script


@pytest.mark.parametrize("source", [np.random.RandomState, np.random.MT19937])
@pytest.mark.parametrize("draws", [0, 1, 5000])
def test_state_that_was_set_is_the_scripts_in_every_session(source: Any, draws: int) -> None:
    state = source(5).state if source is np.random.MT19937 else source(5).get_state()
    np.random.set_state(state)
    np.random.rand(draws)
    seeds = ScriptSeeds()
    assert not seeds_numpy(seeds)
    seeds.on_run_end()
    assert not seeds_numpy(seeds) and "numpy" not in seeds.drawn


@pytest.mark.parametrize("draws", [0, 1, 2, 311, 312, 313, 5000, 1_000_000])
def test_numpy_that_was_only_drawn_from_is_seeded(draws: int) -> None:
    np.random.rand(draws)
    seeds = ScriptSeeds()
    assert seeds_numpy(seeds)
    assert ("numpy" in seeds.drawn) == (draws > 0)


def test_own_state_that_is_set_again_is_no_seed() -> None:
    state = np.random.get_state()
    np.random.rand(5000)
    np.random.set_state(state)
    assert seeds_numpy(ScriptSeeds())


@pytest.mark.parametrize("before_the_end", [True, False])
def test_draws_of_a_run_are_no_seed_of_the_script(before_the_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = ScriptSeeds()
    assert seeds_numpy(seeds)
    monkeypatch.setattr(script_seeds, "_MAX_NUMPY_BLOCKS", 10)
    np.random.rand(50_000 if before_the_end else 1000)
    seeds.on_run_end()
    np.random.rand(0 if before_the_end else 1000)
    assert seeds_numpy(seeds)
    seeds.on_run_end()
    np.random.set_state(np.random.RandomState(5).get_state())
    assert not seeds_numpy(seeds)
