"""A reconciler that is restarted more often than a deadline passes: the deadline passes all the same, and never before its time.

The first tests move a real reconciler round by round over a real database, with a clock that is theirs and an engine that only
answers; the last kills real services while a real agent hangs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet_contract.api.roles import LOCAL_OWNER
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.phases import Cause, Event, JobPhase
from ratchet_contract.protocol.messages import AgentFile, AttemptResult, LaunchFile, RankEnd
from ratchet_service.db import clock as clocks
from ratchet_service.db.clock import Clock
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, Job
from ratchet_service.db.models import Event as Row
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineUnreachable,
    LaunchError,
    LaunchPlan,
    NodeState,
)
from ratchet_service.launchers.registry import Launchers
from ratchet_service.lifecycle.supervision import Timing
from ratchet_service.reconciler.loop import Reconciler
from ratchet_service.scheduling.slots import Capacity
from ratchet_service.usecases import job_actions, submit
from tests.support.api import FakeSubmission, spec
from tests.support.control_plane import Plane
from tests.support.server import wait_for

pytestmark = pytest.mark.takes_turns

LIFE = 4
"""Rounds of one reconciler, a second between two."""
DEADLINE = 10.0
"""Seconds; of whichever deadline a test is about."""
LEASE = 15.0
_AGENT = AgentFile(pid=1, start_time=1, host="there")
UNBEGUN = AttemptState(True, (NodeState(),))
RUNS = AttemptState(True, (NodeState(True, False, _AGENT, None),))
HALF_GONE = AttemptState(True, (NodeState(True, False, _AGENT, None), NodeState(True, True, _AGENT, None)))
QUEUED = AttemptState(True, (NodeState(),), waiting="Pending")


class OwnClock(Clock):
    """``elapsed`` is the truth; each machine's monotonic clock counts from a start of its own."""

    def __init__(self) -> None:
        self.elapsed, self.machine, self.offset = 0.0, "here", 1000.0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.elapsed)

    def monotonic(self) -> float:
        return self.elapsed + self.offset

    def boot_id(self) -> str:
        return self.machine

    def server_now(self, session: Any) -> datetime:
        return self.now()


class Engine:
    """Says ``state`` of whatever was submitted, until it is killed."""

    kind = "local"
    max_nodes: int | None = None
    same_files = True
    excludes_nodes = False

    def __init__(self, slots: bool = True) -> None:
        self.slots, self.state, self.killed = slots, UNBEGUN, False

    def check(self, spec: Any) -> tuple[list[Any], list[Any]]:
        return [], []

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        paths = AttemptPaths(Path(launch.attempt_dir))
        return LaunchPlan(AttemptRef(launch.job_id, launch.attempt, paths, 1), launch, ("agent",))

    def submit(self, plan: LaunchPlan) -> None:
        pass

    def poll(self, ref: AttemptRef) -> AttemptState:
        return AttemptState(False, self.state.nodes) if self.killed else self.state

    def stop(self, ref: AttemptRef, grace: float) -> None:
        pass

    def kill(self, ref: AttemptRef) -> list[str]:
        self.killed = True
        return []

    def logs(self, ref: AttemptRef, limit: int) -> str:
        return ""

    def sweep(self, known: Any) -> list[str]:
        return []


class Stage:
    """One job and its engine, under one reconciler after another."""

    def __init__(self, database: Database, home: HomePaths, clock: OwnClock) -> None:
        self.database, self.home, self.clock = database, home, clock
        self.engine = Engine()
        self.timing = Timing(launch_deadline=DEADLINE, kill_after=DEADLINE, linger=DEADLINE, lost=DEADLINE)
        self.job_id = ""

    def submit(self) -> None:
        data = spec(name="n", world={"ranks_per_node": 1, "device": "cpu"}, policy={"stop_grace": DEADLINE})
        with self.database.write() as session:
            self.job_id = submit.store(session, submit.prepare(data, FakeSubmission()), LOCAL_OWNER).id

    def life(self, until: Callable[[], bool] = lambda: False, rounds: int = LIFE) -> None:
        """A reconciler starts, looks after the job for a while, and ends."""
        launchers: Any = Launchers({"local": self.engine})
        made = Reconciler(
            self.database, self.home, launchers, Capacity(cpus=2), timing=self.timing, lease_seconds=LEASE
        )
        for _ in range(rounds):
            made.run_round()
            self.clock.elapsed += 1.0
            if until():
                break
        made._release_leases()

    def lives(self, until: Callable[[], bool], *, elsewhere: bool = False) -> float:
        """Reconcilers one after the other; seconds until then."""
        began = self.clock.elapsed
        while not until():
            assert self.clock.elapsed - began < 20 * DEADLINE, "the deadline never passes"
            self.life(until)
            if elsewhere:
                self.clock.machine += "'"
                self.clock.offset -= 50.0
        return self.clock.elapsed - began

    def told(self, type_: str) -> bool:
        with self.database.read() as session:
            query = sa.select(Row.id).where(Row.job_id == self.job_id, Row.type == type_)
            return session.scalar(query) is not None

    def wish(self, event: Event) -> None:
        with self.database.write() as session:
            job_actions.apply_action(session, self.job_id, event)

    def set_attempt(self, **values: Any) -> None:
        with self.database.write() as session:
            session.execute(sa.update(Attempt).where(Attempt.job_id == self.job_id).values(**values))

    def job(self) -> Job:
        with self.database.read() as session:
            return session.get_one(Job, self.job_id)


@pytest.fixture
def stage(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    clock = OwnClock()
    monkeypatch.setattr(database, "clock", clock)
    monkeypatch.setattr(database, "_session_info", clocks.session_info(clock))
    home = HomePaths(tmp_path)
    home.jobs.mkdir(parents=True)
    made = Stage(database, home, clock)
    made.submit()
    return made


def _launch(stage: Stage) -> str:
    stage.engine.state = UNBEGUN
    stage.life()
    return "agent-killed"


def _wish(stage: Stage) -> str:
    stage.engine.state = RUNS
    stage.life()
    stage.wish(Event.CANCEL)
    return "agent-stopped"


def _stop(stage: Stage) -> str:
    told = _wish(stage)
    stage.lives(lambda: stage.told(told))
    return "agent-killed"


def _result(stage: Stage) -> str:
    at = stage.clock.now().isoformat()
    ends = [RankEnd(rank=0, exit_code=0, last_step=4)]
    result = AttemptResult(
        job_id=stage.job_id, attempt=1, cause=Cause.COMPLETED, last_step=4, started_at=at, ended_at=at, ranks=ends
    )
    stage.engine.state = RUNS
    stage.life()
    stage.engine.state = AttemptState(True, (NodeState(True, False, _AGENT, result),))
    return "agent-killed"


def _lost(stage: Stage) -> str:
    stage.engine.state = RUNS
    stage.life()
    stage.engine.state = HALF_GONE
    return "agent-killed"


DEADLINES = [_launch, _wish, _stop, _result, _lost]
one_database = pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
"""What is under test asks the database nothing of its own."""


@pytest.mark.parametrize("begun", DEADLINES)
def test_deadline_passes_on_time_across_reconciler_restarts(stage: Stage, begun: Callable[[Stage], str]) -> None:
    """But for seconds as without restarts; and never early."""
    told = begun(stage)
    before = LIFE if begun is _launch else 0
    assert not stage.told(told)
    took = before + stage.lives(lambda: stage.told(told))
    assert DEADLINE <= took <= DEADLINE + 2 * LIFE
    if told == "agent-killed":
        stage.lives(lambda: not stage.job().phase.active or stage.job().phase is JobPhase.QUEUED)


@one_database
@pytest.mark.parametrize("begun", [_launch, _wish])
def test_deadline_passes_when_each_reconciler_runs_on_another_machine(
    stage: Stage, begun: Callable[[Stage], str]
) -> None:
    """Later, and never early."""
    told = begun(stage)
    before = LIFE if begun is _launch else 0
    assert DEADLINE <= before + stage.lives(lambda: stage.told(told), elsewhere=True) <= 8 * DEADLINE


@one_database
@pytest.mark.parametrize("begun", DEADLINES)
def test_time_without_a_reconciler_does_not_count_towards_deadlines(
    stage: Stage, begun: Callable[[Stage], str]
) -> None:
    """A service that was away for an hour: no agent could hear of the wish, or tell of its end."""
    told = begun(stage)
    if begun is not _launch:  # which has had a life already
        stage.life()
    stage.clock.elapsed += 3600.0
    stage.life(lambda: stage.told(told))
    assert not stage.told(told)
    stage.lives(lambda: stage.told(told))


@one_database
@pytest.mark.parametrize("kept", [None, "x", {"wish": {"seconds": -1, "boot": "here"}}])
def test_missing_or_invalid_persisted_deadline_starts_again(stage: Stage, kept: Any) -> None:
    told = _wish(stage)
    stage.life()
    stage.life()
    stage.set_attempt(deadlines=kept)
    assert stage.lives(lambda: stage.told(told)) >= DEADLINE


@one_database
def test_new_desired_state_restarts_the_stop_deadline(stage: Stage) -> None:
    told = _wish(stage)
    stage.life()
    stage.life()
    with stage.database.write() as session:
        session.get_one(Job, stage.job_id).desired_at = stage.clock.now()
    assert stage.lives(lambda: stage.told(told)) >= DEADLINE


@one_database
def test_launch_deadline_excludes_time_in_the_engine_queue(stage: Stage) -> None:
    stage.engine.slots = False
    stage.life()
    stage.engine.state = QUEUED
    for _ in range(5):
        stage.life()
    stage.engine.state = UNBEGUN
    assert DEADLINE - 1.0 <= stage.lives(lambda: stage.told("agent-killed")) <= DEADLINE + 2 * LIFE


@one_database
def test_launch_deadline_excludes_unobserved_time(stage: Stage) -> None:
    stage.engine.slots = False
    stage.life()
    stage.clock.elapsed += DEADLINE
    assert stage.lives(lambda: stage.told("agent-killed")) >= DEADLINE


@one_database
def test_launch_deadline_starts_at_the_repeated_submission(stage: Stage) -> None:
    """Of an attempt whose reconciler ended before it had called the engine there was nothing that could begin."""
    stage.engine.state = AttemptState(False, (NodeState(),))
    submit_ = stage.engine.submit

    def away(plan: LaunchPlan) -> None:
        raise KeyboardInterrupt

    stage.engine.submit = away  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stage.life()
    stage.clock.elapsed += 3600.0
    submitted: list[float] = []

    def begins(plan: LaunchPlan) -> None:
        submit_(plan)
        submitted.append(stage.clock.elapsed)
        stage.engine.state = UNBEGUN

    stage.engine.submit = begins  # type: ignore[method-assign]
    stage.lives(lambda: stage.told("agent-killed"))
    assert len(submitted) == 1 and stage.clock.elapsed - submitted[0] >= DEADLINE


@one_database
def test_agent_is_killed_when_the_engine_cannot_send_sigterm(stage: Stage) -> None:
    def stop(ref: AttemptRef, grace: float) -> None:
        raise LaunchError("the engine knows no such signal")

    told = _wish(stage)
    stage.engine.stop = stop  # type: ignore[method-assign]
    stage.lives(lambda: stage.told(told))
    stage.lives(lambda: stage.told("agent-killed"))


@one_database
@pytest.mark.parametrize("fault", [KeyboardInterrupt, EngineUnreachable])
def test_agent_is_killed_only_a_deadline_after_sigterm_was_delivered(stage: Stage, fault: type[BaseException]) -> None:
    """The history tells of it first: then the reconciler dies, or the engine is away for longer than the agent would have had."""
    told = _wish(stage)
    came: list[float] = []
    failed: list[float] = []

    def stop(ref: AttemptRef, grace: float) -> None:
        failed.append(stage.clock.elapsed)
        if len(failed) == 1 or (fault is EngineUnreachable and failed[-1] - failed[0] < 2 * DEADLINE):
            raise fault("away")
        came.append(stage.clock.elapsed)

    stage.engine.stop = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt) if fault is KeyboardInterrupt else nullcontext():
        stage.lives(lambda: stage.told(told))
    stage.lives(lambda: stage.told("agent-killed"))
    assert came and came[0] < stage.clock.elapsed and (fault is KeyboardInterrupt or len(failed) > 2)
    assert DEADLINE <= stage.clock.elapsed - came[0] <= DEADLINE + 2 * LIFE
    with stage.database.read() as session:
        assert session.scalar(sa.select(sa.func.count(Row.id)).where(Row.type == told)) == 1


@one_database
def test_processes_that_outlive_a_kill_are_reported_once_and_delay_the_next_attempt(stage: Stage) -> None:
    left, kill = ["Slurm job 7 (COMPLETING)"], stage.engine.kill
    stage.engine.kill = lambda ref: left or kill(ref)  # type: ignore[method-assign]
    stage.engine.state = UNBEGUN
    stage.life(rounds=60)
    assert stage.told("agent-killed") and stage.job().phase.active and stage.job().attempt == 1
    with stage.database.read() as session:
        query = sa.select(Row.message).where(Row.job_id == stage.job_id, Row.type == "not-proved-dead")
        (message,) = session.scalars(query)
    assert message.startswith("Slurm job 7 (COMPLETING) of the attempt: not ended")
    left.clear()
    stage.lives(lambda: stage.job().attempt == 2)


@one_database
def test_short_attempt_end_persists_no_deadlines(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """But with the renewals of its lease: what is soon over is in no row."""
    marked: list[float] = []
    _result(stage)
    monkeypatch.setattr(
        "ratchet_service.reconciler.supervise.Watcher._write_deadlines",
        lambda *asked: marked.append(stage.clock.elapsed),
    )
    stage.life(lambda: True)
    stage.engine.state = AttemptState(False, stage.engine.state.nodes)
    stage.lives(lambda: not stage.job().phase.active)
    assert marked == []


# --- real processes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database)
    yield made
    made.close()


@one_database
def test_hanging_agent_is_killed_across_repeated_service_kills(control_plane: Plane) -> None:
    """It holds its lock, hears nothing and answers no SIGTERM. Each service lives for less than ``stop_grace``."""
    process = control_plane.start_process()
    job_id = control_plane.submit({"steps": 100_000}, policy={"stop_grace": 6})
    control_plane.wait_job(job_id, lambda job: job.step > 0, "training")
    pid = _agent(control_plane, job_id)
    os.kill(pid, signal.SIGSTOP)
    control_plane.post(f"/v1/jobs/{job_id}/cancel")
    for _ in range(12):
        _lives(control_plane, job_id, 3.0)
        process.kill()
        process.wait(10)
        if not control_plane.job(job_id).phase.active:
            break
        process = control_plane.start_process()
    job = control_plane.job(job_id)
    assert job.phase is JobPhase.CANCELLED
    assert {"agent-stopped", "agent-killed"} <= {event.type for event in control_plane.events(job_id)}


def _agent(plane: Plane, job_id: str) -> int:
    def found() -> int | None:
        path = plane.attempt_paths(job_id, 1).node(0).agent_file
        return AgentFile.model_validate_json(path.read_bytes()).pid if path.exists() else None

    return int(wait_for(found, "the agent's file", 30))


def _lives(plane: Plane, job_id: str, seconds: float) -> None:
    """The newest service has the job for so long, or ends it."""
    pid = plane.processes[-1].pid

    def has_it() -> bool:
        job = plane.job(job_id)
        return not job.phase.active or f"/{pid}/" in (job.lease_owner or "")

    wait_for(has_it, "the service to look after the job", 30)
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() >= until or not plane.job(job_id).phase.active, "its time", 30)
