"""One schedule: users, reconcilers, agents and a network, each moved as the seed says; then the faults stop, and all must come
to rest where it should.

What runs is the real thing (rounds of ``Reconciler``, ``ingest``, transitions, the use cases of the API) over a real database and
real checkpoint directories; the engine and the agents are models, and so is time.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from ratchet_contract.api.requests import ResumeRequest
from ratchet_contract.api.roles import LOCAL_OWNER
from ratchet_contract.errors import RatchetError
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Event, JobPhase
from ratchet_service.db import leases
from ratchet_service.db.models import Attempt, Base, Checkpoint, Job
from ratchet_service.db.models import Event as Row
from ratchet_service.job_files import delete_job
from ratchet_service.launchers.registry import Launchers
from ratchet_service.lifecycle.supervision import Timing
from ratchet_service.reconciler.background_work import in_caller
from ratchet_service.reconciler.loop import Reconciler
from ratchet_service.scheduling.slots import Capacity
from ratchet_service.usecases import job_actions, submit
from tests.support import invariants
from tests.support.api import FakeSubmission, spec
from tests.support.sim.agents import STEPS, Agent, State
from tests.support.sim.engine import SimLauncher
from tests.support.sim.processes import QUIET, SET_BY, Faults, Process, SimDatabase, Stage

CPUS: Final = 3
LEASE: Final = 15.0
JOBS: Final = 3
TIMEOUT: Final = 1800.0
RECONCILERS: Final = 2
_REST_SECONDS: Final = 1800.0
_ACTIONS: Final = ("suspend", "resume", "cancel", "preempt", "checkpoint", "delete", "resume-from")


class Broken(AssertionError):
    """The schedule of ``seed`` has broken a rule; the message has its trace and the histories."""

    def __init__(self, seed: int, what: str, story: str) -> None:
        super().__init__(f"seed {seed}: {what}\n{story}\nseed {seed}: {what}")
        self.seed, self.what = seed, what


@dataclass(frozen=True)
class Outcome:
    """What a schedule came to; ``history`` is the same for the same seed."""

    steps: int
    history: tuple[str, ...]
    phases: tuple[JobPhase, ...]


@cache
def _prepared(ranks: int) -> submit.Prepared:
    policy = {"backoff": 0.5, "max_failures": 4, "stop_grace": 5.0, "timeout": TIMEOUT}
    data = spec(name="sim", hook={"name": "allreduce"}, world={"ranks_per_node": ranks, "device": "cpu"}, policy=policy)
    return submit.prepare(data, FakeSubmission())


def play(database: SimDatabase, home: Path, seed: int, *, steps: int = 60, faults: Faults = Faults()) -> Outcome:
    """One schedule over an emptied database and directory. Raises ``Broken``."""
    world = World(database, home, seed, faults)
    try:
        with _errors_logged() as logged:
            world.run(steps, logged)
    except AssertionError as error:
        raise Broken(seed, str(error).splitlines()[0], world.story()) from error
    except (RatchetError, SQLAlchemyError, ValueError, LookupError, OSError) as error:
        raise Broken(seed, f"{type(error).__name__}: {error}", world.story()) from error
    finally:
        world.end()
    return Outcome(world.steps, tuple(world.history()), tuple(job.phase for job in world.jobs()))


_EMPTIED: Final = tuple(
    f"DELETE FROM {table.name}"  # jobs first: events go with their job or not at all
    for table in (Base.metadata.tables[Job.__tablename__], *reversed(Base.metadata.sorted_tables))
)
"""As text: made from expressions they were a tenth of a schedule's statements."""


def empty_stage(database: SimDatabase, home: HomePaths) -> None:
    """Rows and files of the schedule before are gone."""
    shutil.rmtree(home.jobs, ignore_errors=True)
    home.jobs.mkdir(parents=True)
    with database.engine.begin() as connection:
        for statement in _EMPTIED:
            connection.exec_driver_sql(statement)


class World:
    def __init__(self, database: SimDatabase, home: Path, seed: int, faults: Faults) -> None:
        self.stage = database.stage = Stage(seed, faults, database.time)
        self.database, self.seed, self.steps = database, seed, 0
        self.home = HomePaths(home)
        empty_stage(database, self.home)
        self.engine = SimLauncher(self.stage, database, self.home, TIMEOUT)
        self.processes: list[Process] = []
        self._reconcilers: dict[str, Reconciler] = {}
        self._known: set[str] = set()
        self._started = 0
        self._submitted = 0
        self._rested_at = 0.0

    # --- the schedule --------------------------------------------------------------------------------------------------

    def run(self, steps: int, logged: list[str]) -> None:
        self._submit()
        for _ in range(RECONCILERS):
            self._start_reconciler()
        for _ in range(steps):
            self._step()
            self._check(logged)
        self._stop_faults()
        while not self._is_idle():
            assert self.stage.clock.elapsed < self._rested_at + _REST_SECONDS, "not all jobs came to rest"
            for process in self.processes:
                process.turn()
            for agent in list(self.engine.agents):
                self._move_agent(agent)
            self.stage.clock.elapsed += 1.0
            self._check(logged)
        self._check_end()

    def _step(self) -> None:
        """One actor's move."""
        self.steps += 1
        stage = self.stage
        stage.clock.elapsed += stage.random.choice((0.02, 0.1, 0.3))
        if stage.chance(stage.faults.jumps):
            stage.clock.elapsed += stage.random.choice((5.0, 20.0, 70.0))
            stage.trace_line("time passes")
        if stage.chance(stage.faults.sets):
            stage.clock.set_by += stage.random.choice(SET_BY)
            stage.trace_line(f"wall clocks are set: {stage.clock.set_by:+.0f} s in all")
        moves: list[tuple[int, Callable[[], None]]] = [(3, self._user), (1, self._network)]
        for process in self.processes:
            moves.append((1 if process.stalled else 6, lambda p=process: self._turn(p)))  # type: ignore[misc]
        for agent in self.engine.agents:
            if agent.state is not State.GONE or agent.flying:
                moves.append((6, lambda a=agent: self._move_agent(a)))  # type: ignore[misc]
        weights = [weight for weight, _ in moves]
        stage.random.choices(moves, weights)[0][1]()

    def _turn(self, process: Process) -> None:
        if process.stalled and self.stage.chance(0.1):
            self.stage.trace_line(f"{process.name} is killed where it stands")
            process.end()
        else:
            process.turn()
        if process.dead:
            self.processes.remove(process)
            self._start_reconciler()

    def _move_agent(self, agent: Agent) -> None:
        if agent.stopped and agent.lingers == 0 and self.stage.chance(0.2):
            agent.stopped = False
            self.stage.trace_line(f"{agent.ref.name} goes on")
        if agent.flying and self.stage.chance(0.3):
            agent.deliver(agent.flying.pop(self.stage.random.randrange(len(agent.flying))), heard=False)
        for _ in range(self.stage.random.randrange(1, 4)):
            agent.act()
        if agent.seen and not agent.stopped and agent.state is not State.GONE:
            agent.report()

    def _network(self) -> None:
        """Something that was on its way for long arrives."""
        waiting = [agent for agent in self.engine.agents if agent.flying]
        if waiting:
            agent = self.stage.random.choice(waiting)
            agent.deliver(agent.flying.pop(0), heard=False)

    def _start_reconciler(self) -> None:
        self._started += 1
        launchers = Launchers({self.engine.kind: self.engine})
        made = Reconciler(
            self.database,
            self.home,
            launchers,
            Capacity(cpus=CPUS),
            timing=Timing(kill_after=3.0),
            lease_seconds=LEASE,
            start=in_caller,
        )

        def round_() -> None:
            made.run_round()

        name = f"reconciler {self._started}"
        self._reconcilers[name] = made
        self.processes.append(Process(name, round_, self.stage))

    # --- users ---------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        self._submitted += 1
        prepared = _prepared(self.stage.random.choice((1, 1, 2)))
        # A back-off's jitter comes from the job's id, and must come again with the seed.
        with (
            patch.object(submit, "new_job_id", lambda: f"job-{self._submitted:012d}"),
            self.database.write() as session,
        ):
            job = submit.store(session, prepared, LOCAL_OWNER)
        self.stage.trace_line(f"{job.id} is submitted")

    def _user(self) -> None:
        jobs = self.jobs()
        if self._submitted < JOBS and self.stage.chance(0.4):
            self._submit()
            return
        if not jobs:
            return
        job, what = self.stage.random.choice(jobs), self.stage.random.choice(_ACTIONS)
        try:
            if what == "delete":
                delete_job.delete(self.database, job.id, homes=self.home)
            else:
                with self.database.write() as session:
                    self._act(session, job.id, what)
        except RatchetError as error:
            if error.code in ("conflict", "error"):
                raise
            return
        self.stage.trace_line(f"user: {what} {job.id}")

    def _act(self, session: Session, job_id: str, what: str) -> None:
        if what == "checkpoint":
            job_actions.request_checkpoint(session, job_id)
        elif what == "resume-from":
            query = sa.select(Checkpoint.step).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step)
            steps = list(session.scalars(query))
            request = ResumeRequest(from_step=self.stage.random.choice(steps) if steps else 1)
            job_actions.resume(
                session, job_id, job_actions.PreparedResume(request, None, []), FakeSubmission(), self.home
            )
        elif what == "resume":
            prepared = job_actions.PreparedResume(ResumeRequest(), None, [])
            job_actions.resume(session, job_id, prepared, FakeSubmission(), self.home)
        else:
            job_actions.apply_action(session, job_id, Event(what))

    # --- the end -------------------------------------------------------------------------------------------------------

    def _stop_faults(self) -> None:
        """Faults stop: who stands goes on, who is out of reach comes back, what is on its way arrives."""
        self.stage.faults = QUIET
        self.stage.trace_line("faults stop")
        self._rested_at = self.stage.clock.elapsed
        for process in list(self.processes):
            while process.stalled:
                process.turn()
            if process is not self.processes[-1]:  # one is enough from here on, and finds the leases of the others
                process.end()
                self.processes.remove(process)
        for agent in self.engine.agents:
            agent.stopped, agent.lingers = False, 0  # ranks without an agent are for the reconciler to find
            while agent.flying:
                agent.deliver(agent.flying.pop(0), heard=False)

    def _is_idle(self) -> bool:
        if any(agent.state is not State.GONE for agent in self.engine.agents):
            return False
        return all(job.phase.terminal or job.phase is JobPhase.SUSPENDED for job in self.jobs())

    # --- what must be true ---------------------------------------------------------------------------------------------

    def _check(self, logged: list[str]) -> None:
        """After every step."""
        assert not logged, logged[0]
        live: dict[str, list[str]] = {}
        for agent in self.engine.agents:
            if agent.works and not agent.out_of_reach:
                live.setdefault(agent.ref.job_id, []).append(agent.ref.name)
        for job_id, names in live.items():
            assert len(names) == 1, f"{job_id}: {', '.join(names)} are alive at one time"
        self._check_rows()
        if self.steps % 10 == 0:
            with self.database.read() as session:
                faults = invariants.check_slots(session, CPUS)
            assert not faults, "; ".join(faults)

    def _check_rows(self) -> None:
        """What runs has a row, committed before it was submitted; who trusts in a lease has it."""
        fresh = {agent.ref.name: agent.ref for agent in self.engine.agents if agent.ref.name not in self._known}
        if fresh:
            self._known |= set(fresh)
            with self.database.read() as session:
                for name, ref in fresh.items():
                    if session.get(Job, ref.job_id) is not None:
                        assert session.get(Attempt, (ref.job_id, ref.attempt)) is not None, (
                            f"{name} runs, and no row knows it"
                        )
        since = self.stage.clock.elapsed - LEASE * leases.SAFE_FRACTION
        trusted: dict[str, str] = {}
        for process in self.processes:
            if process.dead or process.stalled:
                continue
            for job_id, watch in self._reconcilers[process.name]._watches.items():
                if watch.lease_held_at > since and trusted.setdefault(job_id, process.name) != process.name:
                    raise AssertionError(f"{job_id}: both {trusted[job_id]} and {process.name} trust in its lease")

    def _check_end(self) -> None:
        faults = invariants.check_database(self.database, CPUS)
        assert not faults, "; ".join(faults)
        with self.database.read() as session:
            for job in session.scalars(sa.select(Job).where(Job.phase == JobPhase.SUCCEEDED)):
                assert (job.step, job.committed_step) == (STEPS, STEPS), f"{job.id} succeeded at step {job.step}"
                row = session.get(Checkpoint, (job.id, STEPS, job.committed_attempt))
                assert row is not None and row.finished, f"{job.id} succeeded without its last checkpoint"
                assert self.home.job(job.id).checkpoint(STEPS, row.attempt).is_dir(), f"{row.name} is not on the disk"

    # --- for people ----------------------------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        with self.database.read() as session:
            return list(session.scalars(sa.select(Job).order_by(Job.created_at, Job.id)))

    def history(self) -> list[str]:
        with self.database.read() as session:
            rows = list(session.scalars(sa.select(Row).order_by(Row.job_id, Row.id)))
        return self.stage.trace + [
            f"{r.job_id} {r.at:%H:%M:%S.%f} {r.attempt} {r.type}: {r.message} {r.data}" for r in rows
        ]

    def story(self) -> str:
        try:
            return "\n".join(self.history())
        except SQLAlchemyError as error:
            return "\n".join([*self.stage.trace, f"the history cannot be read: {error}"])

    def end(self) -> None:
        self.stage.faults = replace(QUIET)
        for process in self.processes:
            try:
                process.end()
            except Exception as error:
                self.stage.trace_line(f"{process.name} failed at its end: {error}")


class _Errors(logging.Handler):
    """What a round survives, but should not have met."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self.found.append(f"{record.getMessage()}: {type(cause).__name__}: {cause}")


class _errors_logged:
    def __enter__(self) -> list[str]:
        self._handler = _Errors()
        logging.getLogger("ratchet_service").addHandler(self._handler)
        return self._handler.found

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("ratchet_service").removeHandler(self._handler)
