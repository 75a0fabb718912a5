"""One schedule: users, reconcilers, agents and a network, each moved as the seed says. Then the faults stop, and all jobs must
come to rest in the right phase.

The service is the real one (rounds of ``Reconciler``, ``ingest``, transitions, the use cases of the API), with a real database
and real checkpoint directories. The engine, the agents and time are models. ``checks`` has the rules.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Final
from unittest.mock import patch

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from ratchet_contract.api.quotas import EVERYBODY
from ratchet_contract.api.requests import ResumeRequest
from ratchet_contract.errors import RatchetError
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired, Event, JobPhase
from ratchet_service.db import leases
from ratchet_service.db.models import Base, Checkpoint, Job, Quota
from ratchet_service.db.models import Event as Row
from ratchet_service.job_files import delete_job
from ratchet_service.launchers.registry import Launchers
from ratchet_service.reconciler.background_work import in_caller
from ratchet_service.reconciler.loop import Reconciler
from ratchet_service.scheduling.scheduler import Preemption
from ratchet_service.scheduling.slots import Capacity
from ratchet_service.usecases import job_actions, submit
from tests.support.api import FakeSubmission, spec
from tests.support.databases import EMPTIED
from tests.support.sim.agents import Agent, State
from tests.support.sim.checks import CPUS, LEASE, STOP_GRACE, TIMEOUT, TIMING, Checks
from tests.support.sim.engine import SimLauncher
from tests.support.sim.processes import QUIET, SET_BY, Faults, Process, SimDatabase, Stage

JOBS: Final = 3
"""Most jobs of a schedule."""
MOVES: Final = 20
RECONCILERS: Final = 2
_PAUSES: Final = (0.1, 0.5, 2.0)
"""Seconds between two moves."""
_REST_SECONDS: Final = 600.0
_RESTLESS_ROUNDS: Final = 3
"""Rounds of a restless reconciler before it is killed: they take less time than ``STOP_GRACE``."""
_ACTIONS: Final = ("suspend", "resume", "cancel", "preempt", "checkpoint", "delete", "resume-from")


class Broken(AssertionError):
    """The schedule of ``seed`` has broken a rule; the message has its trace and the histories."""

    def __init__(self, seed: int, what: str, story: str) -> None:
        super().__init__(f"seed {seed}: {what}\n{story}\nseed {seed}: {what}")
        self.seed, self.what = seed, what


@dataclass(frozen=True)
class Outcome:
    """The result of a schedule; ``history`` is the same for the same seed."""

    moves: int
    history: tuple[str, ...]
    phases: tuple[JobPhase, ...]


@cache
def prepared_job(ranks: int, priority: int) -> submit.Prepared:
    policy = {"backoff": 0.5, "max_failures": 4, "stop_grace": STOP_GRACE, "timeout": TIMEOUT}
    data = spec(
        name="sim", hook={"name": "allreduce"}, world={"ranks_per_node": ranks, "device": "cpu"}, policy=policy,
        priority=priority,
    )  # fmt: skip
    return submit.prepare(data, FakeSubmission())


def play(database: SimDatabase, home: Path, seed: int, *, moves: int = MOVES, faults: Faults = Faults()) -> Outcome:
    """One schedule over an emptied database and directory. Raises ``Broken``. Its cause is an ``AssertionError`` if a rule of the
    simulation is broken; any other error is one that the service has raised or logged."""
    world = World(database, home, seed, faults)
    try:
        with _logged_errors() as logged, patch.object(leases, "owner_is_dead", world.owner_is_dead):
            world.run(moves, logged)
    except Exception as error:
        what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise Broken(seed, (what or repr(error)).splitlines()[0], world.story()) from error
    finally:
        world.end()
    return Outcome(world.moves, tuple(world.history()), tuple(job.phase for job in world.jobs()))


_EMPTIED: Final = tuple(
    f"DELETE FROM {table.name}"  # jobs first: events go with their job or not at all
    for table in (Base.metadata.tables[Job.__tablename__], *EMPTIED)
)
"""As text: made from expressions they were a tenth of a schedule's statements."""


def empty_stage(database: SimDatabase, home: HomePaths) -> None:
    """Delete the rows and files of the previous schedule."""
    shutil.rmtree(home.jobs, ignore_errors=True)
    home.jobs.mkdir(parents=True)
    with database.engine.begin() as connection:
        for statement in _EMPTIED:
            connection.exec_driver_sql(statement)


class World:
    """``restless``: after the faults, the reconciler is killed and replaced again and again, more often than any deadline passes.
    ``same_host``: a reconciler sees that another one has died, and does not wait for the end of its leases."""

    def __init__(self, database: SimDatabase, home: Path, seed: int, faults: Faults) -> None:
        self.stage = database.stage = Stage(seed, faults, database.time)
        self.database, self.seed, self.moves = database, seed, 0
        self.home = HomePaths(home)
        empty_stage(database, self.home)
        self.engine = SimLauncher(self.stage, database, self.home)
        self.checks = Checks(database, self.engine.agents, self.engine.ended)
        self.processes: list[Process] = []
        self._reconcilers: dict[str, Reconciler] = {}
        self._dead: set[str] = set()
        self._started = 0
        self._submitted = 0
        choose = self.stage.random.randrange
        self.same_host, self.restless, self._has_quota = choose(2) == 0, choose(4) == 0, choose(16) == 0
        self._jobs = 1 + min(choose(JOBS), choose(JOBS))

    def owner_is_dead(self, owner: str | None) -> bool:
        """In place of ``leases.owner_is_dead``: all reconcilers here are of one process."""
        return self.same_host and owner in self._dead

    # --- the schedule --------------------------------------------------------------------------------------------------

    def run(self, moves: int, logged: list[Exception]) -> None:
        """The whole schedule, with ``moves`` moves before the faults stop. ``logged``: the errors that the service has logged."""
        if self._has_quota:
            with self.database.write() as session:
                session.add(Quota(owner=EVERYBODY, jobs=1, updated_at=self.stage.clock.now()))
        self._submit()
        for _ in range(RECONCILERS):
            self._start_reconciler()
        for _ in range(moves):
            self._move()
            self.check(logged)
        self._stop_faults()
        self.check(logged)
        end = self.stage.clock.elapsed + _REST_SECONDS
        while not self._is_idle():
            assert self.stage.clock.elapsed < end, "not all jobs came to rest"
            self._move_all()
            self.check(logged)
            self.stage.clock.elapsed += 1.0 if self._live_agents() else 4.0
        for agent in self.engine.agents:
            while agent.in_transit:
                agent.deliver_pending()
        self.check(logged)
        self.checks.check_end(self.home)

    def check(self, logged: list[Exception] | None = None) -> None:
        """What must be true after each move."""
        if logged:
            raise logged[0]
        lives = [process.name for process in self.processes if not process.dead]
        self.checks.check_move((name, self._reconcilers[name]._watches) for name in lives)

    def _move(self) -> None:
        """The move of one actor."""
        self.moves += 1
        stage = self.stage
        stage.clock.elapsed += stage.random.choice(_PAUSES)
        if stage.chance(stage.faults.jumps):
            stage.clock.elapsed += stage.random.choice((5.0, 20.0, 70.0))
            stage.trace_line("time passes")
        if stage.chance(stage.faults.sets):
            stage.clock.set_by += stage.random.choice(SET_BY)
            stage.trace_line(f"wall clocks are set: {stage.clock.set_by:+.0f} s in all")
        moves: list[tuple[int, Callable[[], None]]] = [(4, self._user)]
        moves += [(2 if process.stalled else 6, partial(self._turn, process)) for process in self.processes]
        moves += [(6, partial(self._move_agent, agent)) for agent in self._live_agents()]
        moves += [(1, agent.deliver_pending) for agent in self.engine.agents if agent.in_transit]
        stage.random.choices([move for _, move in moves], [weight for weight, _ in moves])[0]()

    def _move_all(self) -> None:
        """One round of the reconciler that is left, and moves of all agents."""
        self.moves += 1
        process = self.processes[0]
        process.turn()
        if self.restless and self.moves % _RESTLESS_ROUNDS == 0:
            self._end_process(process)
            self._start_reconciler()
        for agent in self._live_agents():
            agent.act()
            agent.act()
            self._move_agent(agent)

    def _live_agents(self) -> list[Agent]:
        return [agent for agent in self.engine.agents if agent.state is not State.GONE]

    def _turn(self, process: Process) -> None:
        if process.stalled and self.stage.chance(0.1):
            self.stage.trace_line(f"{process.name} is killed while it stands")
            process.end()
        else:
            process.turn()
        if process.dead:
            self._end_process(process)
            self._start_reconciler()

    def _end_process(self, process: Process) -> None:
        process.end()
        self._dead.add(process.name)
        self.processes.remove(process)

    def _move_agent(self, agent: Agent) -> None:
        if agent.stopped and not agent.hangs and agent.lingers == 0 and self.stage.chance(0.2):
            agent.stopped = False
            self.stage.trace_line(f"{agent.ref.name} continues")
        for _ in range(self.stage.random.randrange(1, 4)):
            agent.act()
        if agent.seen and not agent.stopped and agent.state is not State.GONE:
            agent.report()

    def _start_reconciler(self) -> None:
        self._started += 1
        name = f"reconciler {self._started}"
        with patch.object(leases, "new_owner", lambda: name):
            made = Reconciler(
                self.database, self.home, Launchers({self.engine.kind: self.engine}), Capacity(cpus=CPUS), timing=TIMING,
                lease_seconds=LEASE, preemption=Preemption("any"), start=in_caller,
            )  # fmt: skip

        def run_round() -> None:
            made.run_round()

        self._reconcilers[name] = made
        self.processes.append(Process(name, run_round, self.stage))

    # --- users ---------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        self._submitted += 1
        choose = self.stage.random.choice
        ranks, priority, owner = choose((1, 1, 2, 3)), choose((0, 0, 1)), choose(("ada", "bob"))
        # the jitter of a back-off is a function of the job's id, and must be the same for the same seed
        job_id = f"job-{self._submitted:012d}"
        with self.database.write() as session:
            submit.store(session, prepared_job(ranks, priority), owner, job_id=job_id)
        self.stage.trace_line(f"{job_id} of {owner} is submitted: {ranks} ranks, priority {priority}")

    def _user(self) -> None:
        if self._submitted < self._jobs and self.stage.chance(0.4):
            self._submit()
            return
        jobs = self.jobs()
        if jobs:
            self._act_on(self.stage.random.choice(jobs).id, self.stage.random.choice(_ACTIONS))

    def _act_on(self, job_id: str, what: str) -> None:
        """A request of a user; a refusal is no error."""
        try:
            if what == "delete":
                delete_job.delete(self.database, job_id, homes=self.home)
                self.checks.forget(job_id)
            else:
                with self.database.write() as session:
                    self._act(session, job_id, what)
        except RatchetError as error:
            if error.code in ("conflict", "error"):
                raise
            return
        self.stage.trace_line(f"user: {what} {job_id}")

    def _act(self, session: Session, job_id: str, what: str) -> None:
        if what == "checkpoint":
            job_actions.request_checkpoint(session, job_id)
        elif what in ("resume", "resume-from"):
            request = ResumeRequest()
            if what == "resume-from":
                query = sa.select(Checkpoint.step).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step)
                steps = list(session.scalars(query))
                request = ResumeRequest(from_step=self.stage.random.choice(steps) if steps else 1)
            prepared = job_actions.PreparedResume(request, None, [])
            job_actions.resume(session, job_id, prepared, FakeSubmission(), self.home)
        else:
            job_actions.apply_action(session, job_id, Event(what))

    # --- the end -------------------------------------------------------------------------------------------------------

    def _stop_faults(self) -> None:
        """The faults stop: what stands continues, and one reconciler is left, which finds the others' leases. Agents that hang
        still do, and users cancel their jobs."""
        self.stage.faults = replace(QUIET, lingers=self.stage.faults.lingers)
        self.stage.trace_line("faults stop")
        for process in list(self.processes):
            while process.stalled:
                process.turn()
            if process is not self.processes[-1]:
                self._end_process(process)
        for agent in self.engine.agents:
            agent.hangs = agent.hangs and not agent.out_of_reach and not agent.ref.paths.fence_file.exists()
            agent.stopped, agent.lingers = agent.hangs, 0  # ranks without an agent are left for the reconciler to find
        hanging = {agent.ref.job_id for agent in self._live_agents() if agent.hangs}
        for job in self.jobs():
            if job.id in hanging and job.phase.active and job.desired is not Desired.CANCEL:
                self._act_on(job.id, "cancel")

    def _is_idle(self) -> bool:
        if self._live_agents():
            return False
        return all(job.phase.terminal or job.phase is JobPhase.SUSPENDED for job in self.jobs())

    # --- for people ----------------------------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        with self.database.read() as session:
            return list(session.scalars(sa.select(Job).order_by(Job.created_at, Job.id)))

    def history(self) -> list[str]:
        """The trace, and the history of each job."""
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
        """End all threads."""
        self.stage.faults = QUIET
        requests = [one for agent in self.engine.agents for one in agent.in_transit if isinstance(one, Process)]
        for process in [*self.processes, *requests]:
            try:
                process.end()
            except Exception as error:
                self.stage.trace_line(f"{process.name} failed at its end: {error}")


class _Errors(logging.Handler):
    """The errors that the service has logged: it survives them, and none should occur."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[Exception] = []

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self.found.append(cause if isinstance(cause, Exception) else RuntimeError(record.getMessage()))


@contextmanager
def _logged_errors() -> Iterator[list[Exception]]:
    handler, log = _Errors(), logging.getLogger("ratchet_service")
    log.addHandler(handler)
    try:
        yield handler.found
    finally:
        log.removeHandler(handler)
