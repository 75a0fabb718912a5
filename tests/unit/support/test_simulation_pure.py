"""The control plane by seeds, without a database: the service's own rules under model rows, engine, agents and time.

Longer: ``make simulate N=1000``, which plays a hundred times as many.
One again: ``python -m tests.support.sim_in_memory --n 1 --seed S``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from ratchet_contract.phases import JobPhase
from tests.support.sim.stage_pool import map_in_processes
from tests.support.sim_in_memory.__main__ import found_after, played
from tests.support.sim_in_memory.mutants import MUTANTS
from tests.support.sim_in_memory.world import fast, play, story

SCHEDULES = int(os.environ.get("RATCHET_TEST_SCHEDULES_PURE", "2000"))
RARE = ("no_token", "late_submission")
"""Planted faults that take thousands of schedules: ``make simulate`` looks for them."""


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with fast():
        yield


@pytest.mark.parametrize("moves", [20, 60])
def test_simulated_faults_lose_duplicate_or_block_no_job(moves: int) -> None:
    phases: Counter[JobPhase] = Counter()
    attempts = 0
    for seed in range(SCHEDULES * 20 // moves):
        done = play(seed, moves=moves)
        phases.update(done.phases)
        attempts += done.attempts
    assert attempts > SCHEDULES * 20 // moves
    ended = {JobPhase.SUCCEEDED, JobPhase.CANCELLED, JobPhase.SUSPENDED, JobPhase.FAILED}
    assert set(phases) == ended


def test_simulation_is_deterministic_by_seed() -> None:
    first, again = (story(12, 60) for _ in range(2))
    assert first == again and len(first) > 30
    assert story(13, 60) != first


def test_simulation_over_processes_gives_same_results() -> None:
    portions = [range(at, at + 30) for at in range(0, 90, 30)]
    alone, shared = (
        [(part.moves, part.attempts, part.phases) for part in map_in_processes(jobs, played, portions)]
        for jobs in (1, 2)
    )
    assert alone == shared


def test_simulation_failure_reports_seed_and_events() -> None:
    with MUTANTS["slots_forgotten"]():
        found = found_after(range(50))
    assert found is not None
    error = str(found[1])
    assert error.startswith(f"seed {found[1].seed}: CPU slot") and "launches attempt 1" in error and "{'from':" in error
    play(found[1].seed)  # what was planted broke it


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in RARE])
def test_the_simulation_finds_a_planted_fault(name: str) -> None:
    with MUTANTS[name]():
        assert found_after(range(5000)) is not None
