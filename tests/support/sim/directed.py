"""Schedules that are written by hand, for planted faults that random schedules would show only after thousands.

Each function raises ``AssertionError`` if the service breaks a rule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy import event

from ratchet_contract.api.quotas import EVERYBODY
from ratchet_contract.paths import HomePaths
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Quota
from ratchet_service.launchers.registry import Launchers
from ratchet_service.reconciler.launch import AttemptLauncher
from ratchet_service.scheduling import queue_queries
from ratchet_service.scheduling.scheduler import Preemption
from ratchet_service.scheduling.slots import Capacity
from ratchet_service.usecases import submit
from tests.support import invariants
from tests.support.server import wait_for
from tests.support.sim.agents import Agent, State
from tests.support.sim.checks import CPUS, LEASE, TIMING
from tests.support.sim.engine import SimLauncher
from tests.support.sim.processes import BEFORE_TRANSACTION, QUIET, Process, SimDatabase, Stage
from tests.support.sim.world import World, empty_stage, prepared_job

_LATER: Final = 60.0
"""Seconds; longer than a lease."""


def rounds(world: World, process: Process, done: Callable[[], bool]) -> None:
    """Rounds of one reconciler, a second between two, until ``done()``."""
    for _ in range(60):
        process.turn()
        if done():
            return
        world.stage.clock.elapsed += 1.0
    raise LookupError("\n".join(world.history()))


def stop_at(process: Process, here: Callable[[str], bool]) -> None:
    """Rounds until the process reaches a point for which ``here`` returns True; it stands there."""
    original = process.point

    def point(where: str, *, stall: float = 1.0) -> None:
        if here(where):
            process.point = original  # type: ignore[method-assign]
            process.pause(where)
        else:
            original(where, stall=stall)

    process.point = point  # type: ignore[method-assign]
    for _ in range(60):
        process.turn()
        if process.stalled:
            return
        process._stage.clock.elapsed += 1.0
    raise LookupError(f"{process.name} never came to this point")


@contextmanager
def quiet_world(database: SimDatabase, home: Path) -> Iterator[tuple[World, Process]]:
    """A world without faults, with one job and one reconciler, which has not run yet."""
    world = World(database, home, 0, QUIET)
    try:
        world._submit()
        world._start_reconciler()
        yield world, world.processes[0]
    finally:
        world.end()


def second_reconciler(world: World) -> Process:
    world._start_reconciler()
    return world.processes[-1]


def training_agent(world: World, process: Process) -> Agent:
    """The first agent of the only job, after it has begun to train and has reported it."""
    rounds(world, process, lambda: bool(world.engine.agents))
    agent = world.engine.agents[0]
    while agent.state is not State.TRAINING:
        agent.act()
    agent.report()
    return agent


def delayed_submission(database: SimDatabase, home: Path) -> None:
    """SIGSTOP between the commit of attempt 1 and its submission, for longer than the lease. Meanwhile another reconciler ends
    attempt 1 and starts attempt 2. After SIGCONT, no agent of attempt 1 runs."""
    with quiet_world(database, home) as (world, first):
        agents = world.engine.agents
        stop_at(first, lambda where: where.startswith("before submit"))
        world.stage.clock.elapsed += _LATER
        second = second_reconciler(world)
        rounds(world, second, lambda: bool(agents))
        agents[0].die("is killed before it begins")
        rounds(world, second, lambda: len(agents) == 2)
        while agents[1].state is not State.TRAINING:
            agents[1].act()
        first.turn()
        for agent in agents[2:]:
            agent.act()
        world.check()


def delayed_kill(database: SimDatabase, home: Path) -> None:
    """SIGSTOP between the poll at which the launch deadline of attempt 1 has passed and the event of its kill. Meanwhile another
    reconciler ends attempt 1 and starts attempt 2. After SIGCONT, nothing more is written about attempt 1."""
    with quiet_world(database, home) as (world, first):
        agents, clock = world.engine.agents, world.stage.clock
        rounds(world, first, lambda: bool(agents))
        while clock.elapsed < TIMING.launch_deadline - 10.0:
            clock.elapsed += 10.0
            first.turn()
        clock.elapsed = TIMING.launch_deadline + 10.0
        stop_at(first, lambda where: where.startswith("after poll"))
        stop_at(first, lambda where: where == BEFORE_TRANSACTION)
        clock.elapsed += _LATER
        second = second_reconciler(world)
        rounds(world, second, lambda: len(agents) == 2)
        first.turn()
        faults = invariants.check_database(database, CPUS)
        assert not faults, "; ".join(faults)


def renewal_before_takeover(database: SimDatabase, home: Path) -> None:
    """A reconciler has read that a lease has expired, and its owner renews the lease before the reconciler takes it."""
    with quiet_world(database, home) as (world, first):
        training_agent(world, first)
        world.stage.clock.elapsed += _LATER
        second = second_reconciler(world)
        stop_at(second, lambda where: where == BEFORE_TRANSACTION)
        first.turn()
        second.turn()
        world.check()


def concurrent_launches(database: SimDatabase, home: Path) -> None:
    """On PostgreSQL: two reconcilers launch jobs of an owner whose quota is one job, on an engine with its own queue. One has
    decided, and has not committed, when the other decides."""
    url = database.url.render_as_string(hide_password=False)
    launcher = SimLauncher(Stage(0, QUIET, database.time), database, HomePaths(home))
    launcher.slots = False
    databases = [Database(url) for _ in range(2)]
    launching = [
        AttemptLauncher(one, HomePaths(home), Launchers({launcher.kind: launcher}), Capacity(), "", LEASE, Preemption())
        for one in databases
    ]
    decided, may_commit = threading.Event(), threading.Event()

    def before_commit(_session: object) -> None:
        decided.set()
        may_commit.wait(60)

    empty_stage(database, HomePaths(home))
    with databases[1].write() as session:
        session.add(Quota(owner=EVERYBODY, jobs=1, updated_at=databases[1].clock.now()))
        submit.store(session, prepared_job(1, 0), "ada")
    event.listen(databases[0].session_class, "before_commit", before_commit)
    threads = [threading.Thread(target=one.launch_ready) for one in launching]
    threads[0].start()
    decided.wait(60)
    with databases[1].write() as session:
        submit.store(session, prepared_job(1, 1), "ada")
    threads[1].start()
    waiting = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    with databases[1].engine.connect() as connection:
        wait_for(lambda: not threads[1].is_alive() or connection.scalar(waiting), "the second launch to wait or end")
    may_commit.set()
    for thread in threads:
        thread.join(60)
    with databases[1].read() as session:
        held = queue_queries.held_by_owner(session)["ada"]
    for one in databases:
        one.dispose()
    assert held.jobs == 1, f"{held.jobs} jobs of one owner have an attempt, and the quota is 1"


DIRECTED: Final[dict[str, Callable[[SimDatabase, Path], None]]] = {
    "late_submission": delayed_submission,
    "no_token": delayed_kill,
    "renewed_and_taken": renewal_before_takeover,
    "no_launch_lock": concurrent_launches,
}
"""By the name of the planted fault."""
NEEDS_POSTGRES: Final = frozenset({"no_launch_lock"})
