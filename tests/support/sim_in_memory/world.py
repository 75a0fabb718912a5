"""One schedule of the fast lane: users, reconcilers, agents and a network over rows in memory, each moved as the seed says;
then the faults stop, and all must come to rest where it should. Hundreds of times as fast as ``tests.support.sim``, which runs
the whole service over a real database.

The service's own: the transition table and what a transition writes (``transitions.transition_values``), ``decide`` with budgets
and treatment, what follows from a poll (``supervision``), an end's cause, facts and columns (``attempt_result``,
``attempt_cause.combine_ends``), the terms of leases (``leases``), whom reports are taken from and which of their messages are new
(``fencing``, ``deduplicate``), the whole scheduling pass (``scheduler.schedule``), lineages, which requests change nothing
(``job_actions._is_already_applied``), ``goodput``. Modelled: rows and guarded writes (``database``), the order of reads, writes
and calls (``reconciler``, ``launching``), engine, agents, disk (``agents``), users (here).

A seed is of SQLite or of PostgreSQL: on the latter a transaction that launches sees what others commit between its statements,
and only the lock on slots keeps another launch out.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import RatchetError
from ratchet_contract.phases import Desired, Event, JobPhase
from ratchet_service.scheduling.fair_order import UNLIMITED, Limit
from tests.support.sim.processes import QUIET, SET_BY, Faults
from tests.support.sim_in_memory.agents import BEGUN, GONE, TRAINING, Engine
from tests.support.sim_in_memory.checks import Checked
from tests.support.sim_in_memory.database import Job
from tests.support.sim_in_memory.launching import END, POINT
from tests.support.sim_in_memory.reconciler import Reconciler

JOBS: Final = 3
"""At most; a seed has from one on."""
MOVES: Final = 20
WEATHER: Final = Faults(die=0.02, stall=0.06, away=0.01, lost=0.15, agent=0.03, lingers=0.1, jumps=0.05, sets=0.02)
GALE: Final = Faults(die=0.03, stall=0.12, away=0.03, lost=0.3, agent=0.08, lingers=0.3, jumps=0.1, sets=0.05)
_REST: Final = 1800.0
_LIFE: Final = 3
"""Rounds of a restless reconciler, a second or more between two: less than ``stop_grace``."""
_ONE_JOB: Final = Limit(jobs=1)
_PLAIN: Final = (Event.SUSPEND, Event.RESUME, Event.CANCEL, Event.PREEMPT)


class Broken(AssertionError):
    """The schedule of ``seed`` has broken a rule; the message has its trace and the histories."""

    def __init__(self, seed: int, what: str, story: str) -> None:
        super().__init__(f"seed {seed}: {what}\n{story}\nseed {seed}: {what}")
        self.seed, self.what = seed, what


@dataclass(frozen=True)
class Outcome:
    """``moves``: turns of one actor, those after the faults have stopped included."""

    moves: int
    phases: tuple[JobPhase, ...]
    attempts: int


def play(seed: int, *, moves: int = MOVES) -> Outcome:
    """One schedule, with ``moves`` moves before the faults stop. Raises ``Broken``."""
    world = World(seed)
    try:
        world.run(moves)
    except (AssertionError, RatchetError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise Broken(seed, what.splitlines()[0] if what else repr(error), "\n".join(story(seed, moves))) from error
    phases = tuple(job.phase for job in world.all_jobs())
    made = Outcome(world.moves, phases, sum(map(len, world.attempts.values())))
    world.close()
    return made


@contextmanager
def fast() -> Iterator[None]:
    """Schedules leave no cycles behind: the collector of cycles finds nothing in them, and takes a sixth of the time."""
    was = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()


def story(seed: int, moves: int = MOVES) -> list[str]:
    """The same schedule again, told: what everybody did, and the jobs' histories."""
    world = World(seed, told=True)
    try:
        world.run(moves)
    except Exception as error:
        world.trace_line(f"{type(error).__name__}: {error}")
    histories = [
        f"{job_id} {told.at:%H:%M:%S.%f} {told.attempt} {told.type} {told.data} {told.message}"
        for job_id, events in world.events.items()
        for told in events
    ]
    return [*world.lines, *histories]


class World(Checked):
    def __init__(self, seed: int, *, told: bool = False, lowest: int = POINT) -> None:
        """``lowest``: ``CALL``, and reconcilers are left standing at calls of the engine alone."""
        super().__init__()
        random_ = random.Random(seed)
        self.rnd = random_.random
        self.trace, self.lines = told, list[str]()
        self.seed, self.moves, self.lowest = seed, 0, lowest
        kind = self.draw_index(16)
        self.faults = GALE if kind & 1 else WEATHER
        self.postgres, self.same_host = bool(kind & 2), bool(kind & 4)
        self.restless = self.draw_index(4) == 0
        """A reconciler is killed and started again and again, more often than any deadline passes, until all rests."""
        self._quota = _ONE_JOB if kind == 8 else UNLIMITED
        self.engine = Engine(self)
        self.disk: dict[str, dict[tuple[int, int], bool]] = {}
        self.bases: dict[tuple[str, int], Base] = {}
        self.fences: set[tuple[str, int]] = set()
        self.dead: set[str] = set()
        self.launching: Reconciler | None = None
        self.reconcilers: list[Reconciler] = []
        self._stalled: set[str] = set()
        self._started = self._submitted = 0
        self._jobs = 1 + min(self.draw_index(JOBS), self.draw_index(JOBS))

    def close(self) -> None:
        for one in self.reconcilers:
            one.points.close()
        self.__dict__.clear()

    def draw_index(self, n: int) -> int:
        return int(self.rnd() * n)

    def trace_line(self, text: str) -> None:
        self.lines.append(f"{self.t:8.2f} {text}")

    def limit(self, owner: str) -> Limit:
        return self._quota

    def slots_lock(self, reconciler: Reconciler) -> Reconciler | None:
        return reconciler

    def monotonic(self) -> float:
        return self.t

    def boot_id(self) -> str:
        return ""

    def fence(self, ref: tuple[str, int]) -> None:
        self.fences.add(ref)

    # --- the schedule --------------------------------------------------------------------------------------------------

    def run(self, moves: int) -> None:
        self._submit()
        self._start_reconciler()
        self._start_reconciler()
        for _ in range(moves):
            self._move()
        self.moves = moves
        self._stop_faults()
        limit, rounds = self.t + _REST, 0
        while not self._is_idle():
            assert self.t < limit, "not all jobs came to rest"
            self._whole_round(self.reconcilers[0])
            self.moves += 1
            rounds += 1
            if self.restless and rounds % _LIFE == 0:
                self._end(self.reconcilers[0])
                self._start_reconciler()
            busy = False
            for agent in self.engine.agents:
                if agent.state != GONE:
                    agent.act()
                    agent.act()
                    self._move_agent(agent)
                    self.moves += 1
                    busy = True
            self.advance_time(1.0 if busy else 4.0)
        self.check_end()

    def _move(self) -> None:
        """One actor's."""
        rnd, faults = self.rnd, self.faults
        if rnd() < faults.sets:
            self.set_by += SET_BY[self.draw_index(len(SET_BY))]
            self.trace and self.trace_line(f"wall clocks are set: {self.set_by:+.0f} s in all")
        self.advance_time(0.02 + 0.28 * rnd() if rnd() >= faults.jumps else (5.0, 20.0, 70.0)[self.draw_index(3)])
        agents = self.engine.agents
        if agents:
            agents = [agent for agent in agents if agent.state != GONE or agent.flying]
        picked = rnd() * (3.0 + 4.0 * (len(self.reconcilers) + len(agents)))
        if picked < 3.0:
            self._user()
            return
        at = int((picked - 3.0) / 4.0)
        if at < len(self.reconcilers):
            self._turn(self.reconcilers[at])
        else:
            self._move_agent(agents[at - len(self.reconcilers)])

    def _turn(self, one: Reconciler) -> None:
        """Until it stands still, its round ends, or it does."""
        rnd, faults = self.rnd, self.faults
        die, stall = faults.die, faults.die + faults.stall
        if one.name in self._stalled:
            self._stalled.discard(one.name)
            self.trace and self.trace_line(f"{one.name} goes on")
        for place in one.points:
            if place == END or (self.launching is not None and self.launching is not one and not rnd() < 0.5):
                return
            if place < self.lowest:
                continue
            drawn = rnd()
            if drawn < die:
                self.trace and self.trace_line(f"{one.name} dies")
                self._end(one)
                self._start_reconciler()
                return
            if drawn < stall:
                self.trace and self.trace_line(f"{one.name} stands still")
                self._stalled.add(one.name)
                return

    def _whole_round(self, one: Reconciler) -> None:
        for place in one.points:
            if place == END:
                return

    def _end(self, one: Reconciler) -> None:
        one.points.close()
        self.dead.add(one.name)
        self._stalled.discard(one.name)
        self.reconcilers.remove(one)
        if self.launching is one:
            self.launching = None

    def _start_reconciler(self) -> None:
        self._started += 1
        self.reconcilers.append(Reconciler(self, f"reconciler {self._started}"))

    def _move_agent(self, agent: Any) -> None:
        rnd = self.rnd
        if agent.stopped and not agent.deaf and agent.lingers == 0 and rnd() < 0.2:
            agent.stopped = False
            self.trace and self.trace_line(f"{agent.name} goes on")
        if agent.flying and rnd() < 0.3:
            agent.deliver_pending()
        for _ in range(1 + self.draw_index(3)):
            agent.act()
        if agent.seen and not agent.stopped and agent.state != GONE:
            agent.report()

    # --- users ---------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        self._submitted += 1
        job_id = f"job-{self.seed & 0xFFFF:04x}{self._submitted:08d}"
        ranks, priority, owner = 1 + self.draw_index(3), self.draw_index(2), ("ada", "bob")[self.draw_index(2)]
        self._store_job(job_id, owner, priority, ranks)
        self.trace and self.trace_line(f"{job_id} of {owner} is submitted: priority {priority}, {ranks} ranks")

    def _store_job(self, job_id: str, owner: str, priority: int, ranks: int) -> None:
        self.jobs[job_id] = Job(job_id, owner, priority, ranks, self.now)
        self.attempts[job_id], self.checkpoints[job_id], self.events[job_id] = [], [], []

    def all_jobs(self) -> list[Any]:
        """The jobs' rows as they are now, the oldest first."""
        return list(self.jobs.values())

    def _user(self) -> None:
        if self._submitted < self._jobs and self.rnd() < 0.5:
            self._submit()
            return
        jobs = self.all_jobs()
        if not jobs:
            return
        job, what = jobs[self.draw_index(len(jobs))], self.draw_index(8)
        try:
            if what < 5:
                self.act(job, _PLAIN[what & 3])
            elif what == 5:
                self._ask_checkpoint(job)
            elif what == 6:
                self._resume_from(job)
            else:
                self._delete(job)
        except RatchetError as error:
            assert error.code not in ("conflict", "error"), error
            return
        self.trace and self.trace_line(f"user: wish {what} for {job.id}")

    def _ask_checkpoint(self, job: Any) -> None:
        self.apply(job, Event.CHECKPOINT, values={"checkpoint_request": job.checkpoint_request + 1})

    def _resume_from(self, job: Any) -> None:
        """As ``actions.resume`` with a step."""
        if job.phase.active:
            return
        there = list(self.committed(job, self.lineage(job)))
        if there:
            row = there[self.draw_index(len(there))]
            source = {"step": row.step, "attempt": row.attempt}
            values = {"resume_from": source, "not_before": None}
            self.apply(job, Event.RESUME, values=values, data={"from_step": row.step})

    def _delete(self, job: Any) -> None:
        self.apply(job, Event.DELETE)
        for table in (self.jobs, self.attempts, self.checkpoints, self.events):
            del table[job.id]

    # --- the end -------------------------------------------------------------------------------------------------------

    def _stop_faults(self) -> None:
        """Faults stop: who stands goes on, what is on its way arrives; one reconciler is left, and finds the others' leases. Who
        hangs for good does so, and its job is cancelled."""
        self.faults = QUIET
        self.trace and self.trace_line("faults stop")
        for one in list(self.reconcilers):
            if one.name in self._stalled:
                self._stalled.discard(one.name)
                if self.launching is None or self.launching is one:
                    self._whole_round(one)
        for one in self.reconcilers[:-1]:
            self._end(one)
        for agent in self.engine.agents:
            agent.deaf = agent.deaf and not agent.out_of_reach and (agent.job_id, agent.attempt) not in self.fences
            agent.stopped, agent.lingers = agent.deaf, 0
            while agent.flying:
                agent.deliver_pending()
        hanging = {agent.job_id for agent in self.engine.agents if agent.deaf and agent.state in (BEGUN, TRAINING)}
        for job in self.all_jobs():
            if job.id in hanging and job.phase.active and job.desired is not Desired.CANCEL:
                self.act(job, Event.CANCEL)

    def _is_idle(self) -> bool:
        return all(agent.state == GONE for agent in self.engine.agents) and all(
            job.phase.terminal or job.phase is JobPhase.SUSPENDED for job in self.all_jobs()
        )
