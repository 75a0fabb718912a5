"""The control plane by seeds: real rounds, real rows, real checkpoints; engine, agents and time are models.

Longer: ``make simulate N=10000``. A schedule that breaks a rule tells its seed, its trace and the jobs' histories.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet_contract.phases import JobPhase
from ratchet_service.db.engine import sqlite_url
from ratchet_service.db.migrate import upgrade
from tests.support.sim.agents import State
from tests.support.sim.mutants import MUTANTS
from tests.support.sim.processes import QUIET, STORM, Faults, Process, SimDatabase
from tests.support.sim.stage_pool import stage_directory
from tests.support.sim.world import Broken, World, play

SCHEDULES = int(os.environ.get("RATCHET_TEST_SCHEDULES", "6"))
QUICK = ("no_expiry", "slots_forgotten", "epoch_again")
"""Planted faults that the first few schedules find; the others are looked for by ``make simulate``."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with stage_directory() as made:
        yield made


@pytest.fixture(scope="module")
def lite(folder: Path) -> Iterator[SimDatabase]:
    database = SimDatabase(sqlite_url(folder / "ratchet.db"))
    upgrade(database)
    yield database
    database.dispose()


@pytest.fixture(scope="module")
def served(postgres_url: str) -> Iterator[SimDatabase]:
    database = SimDatabase(postgres_url)
    upgrade(database)
    yield database
    database.dispose()


@pytest.mark.parametrize(("faults", "first"), [(Faults(), 0), (STORM, 100_000)], ids=["weather", "storm"])
def test_simulated_faults_lose_double_or_block_no_job(
    lite: SimDatabase, folder: Path, faults: Faults, first: int
) -> None:
    phases = [
        phase for seed in range(first, first + SCHEDULES) for phase in play(lite, folder, seed, faults=faults).phases
    ]
    assert {JobPhase.SUCCEEDED, JobPhase.CANCELLED} <= set(phases)


def test_simulated_faults_on_postgresql_break_no_invariant(served: SimDatabase, folder: Path) -> None:
    for seed in range(200_000, 200_000 + max(1, SCHEDULES // 4)):
        play(served, folder, seed, faults=STORM)


def test_same_seed_gives_same_history(lite: SimDatabase, folder: Path) -> None:
    first, again = (play(lite, folder, 7, faults=STORM) for _ in range(2))
    assert first == again and len(first.history) > 30
    assert play(lite, folder, 8, faults=STORM).history != first.history


@pytest.mark.parametrize("name", MUTANTS if SCHEDULES > 100 else QUICK)
def test_simulation_detects_planted_fault(lite: SimDatabase, folder: Path, name: str) -> None:
    with pytest.raises(Broken), MUTANTS[name]():
        for seed in range(max(SCHEDULES, 20) * 4):
            play(lite, folder, seed, faults=STORM)


@pytest.mark.parametrize("mutant", [None, "late_submission"])
def test_delayed_submission_starts_no_agent_next_to_a_later_attempt(
    lite: SimDatabase, folder: Path, mutant: str | None
) -> None:
    """SIGSTOP between the commit of attempt 1 and its submission, for longer than the lease; meanwhile another reconciler has
    ended attempt 1 and started attempt 2."""
    world = World(lite, folder, 0, QUIET)
    stage, engine = world.stage, world.engine
    try:
        with MUTANTS["late_submission"]() if mutant else pytest.MonkeyPatch.context():
            world._submit()
            world._start_reconciler()
            (first,) = world.processes
            stopped_at(first, lambda place: place.startswith("before submit"))
            stage.clock.elapsed += 60.0
            world._start_reconciler()
            second = world.processes[1]
            rounds(world, second, lambda: bool(engine.agents))
            engine.agents[0].die("is killed before it begins")
            rounds(world, second, lambda: len(engine.agents) == 2)
            new = engine.agents[1]
            while new.state is not State.TRAINING:
                new.act()
            first.turn()  # SIGCONT
            for agent in engine.agents[2:]:
                agent.act()
            late = [agent for agent in engine.agents[2:] if agent.works]
            assert [agent.ref.attempt for agent in late] == ([1] if mutant else []), "attempt 1 runs beside attempt 2"
            assert new.ref.attempt == 2
    finally:
        world.end()


@pytest.mark.parametrize(("at", "told"), [("after a commit", "agent-stopped"), ("after poll", "agent-killed")])
def test_reconciler_with_lost_lease_does_not_stop_or_kill_the_job(
    lite: SimDatabase, folder: Path, at: str, told: str
) -> None:
    """It stands between a decision and the deed; when it goes on, its lease is another's."""
    world = World(lite, folder, 0, QUIET)
    calls: list[str] = []
    try:
        world._submit()
        world._start_reconciler()
        first, engine = world.processes[0], world.engine
        rounds(world, first, lambda: bool(engine.agents))
        agent = engine.agents[0]
        for _ in range(3):
            agent.act()
        agent.report()
        with lite.write() as session:
            world._act(session, agent.ref.job_id, "suspend")  # which the agent does not hear of
        stopped_at(first, lambda place: place.startswith(at) and told in "".join(world.history()))
        world.stage.clock.elapsed += 60.0
        world._start_reconciler()
        world.processes[1].turn()
        engine.kill = lambda _: calls.append("kill") or []  # type: ignore[assignment,func-returns-value,method-assign]
        engine.stop = lambda *_: calls.append("stop")  # type: ignore[assignment,method-assign]
        first.turn()  # SIGCONT
        assert calls == [], "it ended what another looks after"
    finally:
        world.end()


def rounds(world: World, process: Process, done: Callable[[], bool]) -> None:
    """Rounds of one reconciler, a second between two, until ``done()``."""
    for _ in range(60):
        process.turn()
        if done():
            return
        world.stage.clock.elapsed += 1.0
    raise AssertionError("\n".join(world.history()))


def stopped_at(process: Process, here: Callable[[str], bool]) -> None:
    """Rounds until the process reaches a point that is meant; there it stands."""
    goes_on = process.point

    def point(where: str, *, stall: float = 1.0) -> None:
        if process.stalled is None and here(where):
            process.point = goes_on  # type: ignore[method-assign]
            process.stalled = where
            process._hand_back()
        goes_on(where, stall=stall)

    process.point = point  # type: ignore[method-assign]
    for _ in range(60):
        process.turn()
        if process.stalled:
            return
        process._stage.clock.elapsed += 1.0
    raise AssertionError(f"{process.name} never came there")
