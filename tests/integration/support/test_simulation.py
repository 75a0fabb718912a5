"""The control plane by seeds: real rounds, real rows, real checkpoints; engine, agents and time are models.

More schedules, and all planted faults: ``make simulate``. The error of a schedule that breaks a rule has its seed and histories.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from ratchet_contract.phases import JobPhase
from ratchet_service.db.engine import sqlite_url
from ratchet_service.db.migrate import upgrade
from tests.support.sim.__main__ import hunt
from tests.support.sim.directed import (
    DIRECTED,
    NEEDS_POSTGRES,
    quiet_world,
    second_reconciler,
    stop_at,
    training_agent,
)
from tests.support.sim.mutants import MUTANTS
from tests.support.sim.processes import STORM, Faults, SimDatabase
from tests.support.sim.stage_pool import stage_directory
from tests.support.sim.world import Broken, play

SCHEDULES = int(os.environ.get("RATCHET_TEST_SCHEDULES", "30"))
RARE = ("nothing_adopted", "restarts_deadlines")
"""Planted faults that take dozens of schedules: ``make simulate`` looks for them."""
LATE = {"suspend_forgotten": 30, "settled_alive": 27, "backoff_forgotten": 23, "stored_twice": 13}
"""Schedules that show nothing of these faults, which come first by their seeds."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with stage_directory() as made:
        yield made


@pytest.fixture(scope="module")
def sqlite(folder: Path) -> Iterator[SimDatabase]:
    database = SimDatabase(sqlite_url(folder / "ratchet.db"))
    upgrade(database)
    yield database
    database.dispose()


@pytest.fixture(scope="module")
def postgres(postgres_url: str) -> Iterator[SimDatabase]:
    database = SimDatabase(postgres_url)
    upgrade(database)
    yield database
    database.dispose()


@pytest.mark.parametrize(("faults", "first"), [(Faults(), 0), (STORM, 100_000)], ids=["few faults", "storm"])
def test_simulated_faults_lose_double_or_block_no_job(
    sqlite: SimDatabase, folder: Path, faults: Faults, first: int
) -> None:
    phases = {
        phase for seed in range(first, first + SCHEDULES) for phase in play(sqlite, folder, seed, faults=faults).phases
    }
    assert {JobPhase.SUCCEEDED, JobPhase.CANCELLED, JobPhase.SUSPENDED} <= phases


def test_simulated_faults_on_postgresql_break_no_invariant(postgres: SimDatabase, folder: Path) -> None:
    for seed in range(200_000, 200_000 + max(1, SCHEDULES // 4)):
        play(postgres, folder, seed, faults=STORM)


def test_same_seed_gives_same_history(sqlite: SimDatabase, folder: Path) -> None:
    first, again = (play(sqlite, folder, 7, moves=40, faults=STORM) for _ in range(2))
    assert first == again and len(first.history) > 30
    assert play(sqlite, folder, 8, moves=40, faults=STORM).history != first.history


def test_broken_schedule_reports_seed_rule_and_history(sqlite: SimDatabase, folder: Path) -> None:
    with MUTANTS["submit_first"](), pytest.raises(Broken) as raised:
        play(sqlite, folder, 5)
    error = str(raised.value)
    rule = "seed 5: job-000000000001-a0001 is submitted, and has no row"
    assert error.startswith(rule) and error.endswith(rule)
    assert "job-000000000001 of " in error and " submitted: job sim submitted {" in error
    play(sqlite, folder, 5)  # without the fault


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in {*RARE, *DIRECTED}])
def test_simulation_detects_planted_fault(sqlite: SimDatabase, folder: Path, name: str) -> None:
    assert hunt(sqlite, folder, name, seeds=range(LATE.get(name, 0), 200)).what is not None


@pytest.mark.parametrize("planted", [False, True], ids=["sound", "planted"])
@pytest.mark.parametrize("name", DIRECTED)
def test_directed_schedule_breaks_a_rule_only_with_its_planted_fault(
    request: pytest.FixtureRequest, folder: Path, name: str, planted: bool
) -> None:
    database = request.getfixturevalue("postgres" if name in NEEDS_POSTGRES else "sqlite")
    with MUTANTS[name]() if planted else nullcontext(), pytest.raises(AssertionError) if planted else nullcontext():
        DIRECTED[name](database, folder)


@pytest.mark.parametrize(("at", "event"), [("after a commit", "agent-stopped"), ("after poll", "agent-killed")])
def test_reconciler_with_lost_lease_does_not_stop_or_kill_the_job(
    sqlite: SimDatabase, folder: Path, at: str, event: str
) -> None:
    """It stands between a decision and the action; when it continues, another has its lease."""
    calls: list[str] = []
    with quiet_world(sqlite, folder) as (world, first):
        agent, engine = training_agent(world, first), world.engine
        with sqlite.write() as session:
            world._act(session, agent.ref.job_id, "suspend")  # which the agent does not receive
        stop_at(first, lambda place: place.startswith(at) and event in "".join(world.history()))
        world.stage.clock.elapsed += 60.0
        second_reconciler(world).turn()
        engine.kill = lambda _: calls.append("kill") or []  # type: ignore[assignment,func-returns-value,method-assign]
        engine.stop = lambda *_: calls.append("stop")  # type: ignore[assignment,method-assign]
        first.turn()  # SIGCONT
        assert calls == [], "it acts on a job that another reconciler supervises"
