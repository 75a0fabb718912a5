"""The reconciler with an engine that has a queue, may be away, and knows of ends that no agent could tell.

The engine is a stand-in: the local launcher, whose answers are bent. The agents, the rows and the reconciler are real.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause, Desired, JobPhase
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, AttemptNode, Job
from ratchet_service.launchers.base import AttemptRef, AttemptState, EngineEnd, EngineUnreachable, LaunchPlan
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.launchers.registry import Launchers
from ratchet_service.lifecycle.supervision import Timing
from ratchet_service.reconciler import launch as launching
from ratchet_service.scheduling import queue_queries
from tests.support.control_plane import Plane, trainer_launcher
from tests.support.server import processes_below, wait_for

pytestmark = pytest.mark.takes_turns

one_database = pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
"""What is under test asks the database nothing of its own."""

INTERRUPTED = {"epochs": {"1": {"at": 20, "do": "wait"}}}
"""A job whose first attempt trains until it is stopped or killed; the second one completes."""


class Engine(LocalLauncher):
    """``queued``: submitted groups wait; ``starting``: they are out of the queue, without an agent yet; ``away``: it does not
    answer; ``closed``: it takes no groups now; ``ends``: what it says of an attempt that is over, until a kill; ``held``:
    it says that the attempt is alive; ``cut_off``: it says that the machine does not answer, where the agent runs on until it
    hears of the fence; ``slow``: kills that come to nothing; ``unplannable``: a job's name; ``ponders``: likewise, of one
    whose plan takes until ``knows`` is set."""

    slots = False
    queued = False
    starting = 0
    away = False
    closed = False
    held = False
    cut_off = False
    slow = 0
    unplannable = ponders = ""
    ends: tuple[EngineEnd, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting: dict[str, LaunchPlan] = {}
        self.looks = self.submits = 0
        self.asked, self.knows = threading.Event(), threading.Event()

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        if launch.spec.name == self.ponders:
            self.asked.set()
            assert self.knows.wait(120)
        if launch.spec.name == self.unplannable:
            raise ValueError("the launchers file does not allow this namespace any more")
        return super().plan(launch)

    def submit(self, plan: LaunchPlan) -> None:
        self._answer()
        self.submits += 1
        if self.closed:
            raise EngineUnreachable("the engine takes no jobs now: 503")
        if self.queued:
            self.waiting[plan.ref.name] = plan
        else:
            super().submit(plan)

    def poll(self, ref: AttemptRef) -> AttemptState:
        self._answer()
        self.looks += 1
        if ref.name in self.waiting and self.queued:
            return AttemptState(True, waiting="Pending: 3 jobs of a higher priority")
        if ref.name in self.waiting and self.starting:
            self.starting -= 1
            return AttemptState(True)
        if ref.name in self.waiting:
            super().submit(self.waiting.pop(ref.name))
        state = replace(super().poll(ref), ends=self.ends)
        if self.cut_off and state.seen:
            state = replace(state, alive=True, nodes=tuple(replace(node, gone=True) for node in state.nodes))
        return replace(state, alive=True) if self.held else state

    def kill(self, ref: AttemptRef) -> list[str]:
        self._answer()
        self.waiting.pop(ref.name, None)
        if self.slow:
            self.slow, self.ends = self.slow - 1, ()
            return ["pod x, which is ending"]
        if self.cut_off and not super().poll(ref).results:
            return ["pod x, on a machine that does not answer"]
        self.cut_off = False
        return super().kill(ref)

    def _answer(self) -> None:
        if self.away:
            raise EngineUnreachable("the engine's controller does not answer: connection refused")


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database, cpu_slots=1)
    made.serve_api()
    yield made
    made.close()


@pytest.fixture
def engine(control_plane: Plane) -> Engine:
    made = trainer_launcher(control_plane.paths, Engine)
    assert isinstance(made, Engine)
    return made


def agent_pid(plane: Plane, job_id: str, attempt: int = 1) -> int:
    def found() -> int | None:
        with plane.database.read() as session:
            node = session.get(AttemptNode, (job_id, attempt, 0))
            return None if node is None else node.pid

    return int(wait_for(found, "the agent to be recorded", 30))


def test_engine_queue_time_is_shown_and_not_counted_against_limits(control_plane: Plane, engine: Engine) -> None:
    """Neither against the launch deadline, nor the job's timeout, nor this machine's slots."""
    engine.queued = True
    control_plane.start_reconciler(engine, Timing(launch_deadline=4))
    jobs = [control_plane.submit({"steps": 20}, policy={"timeout": 20, "stop_grace": 5}) for _ in range(2)]
    for job_id in jobs:
        told = control_plane.wait_job(job_id, lambda job: job.reason == "engine-queue", "told that it waits")
        assert told.phase is JobPhase.STARTING and told.message == "Pending: 3 jobs of a higher priority"
    begun, looks = time.monotonic(), engine.looks
    wait_for(lambda: time.monotonic() - begun > 4.5 and engine.looks > looks + 4, "the launch deadline to pass", 30)
    released = time.monotonic()
    engine.queued = False
    for job_id in jobs:
        job = control_plane.wait(job_id, JobPhase.SUCCEEDED)
        assert (job.reason, job.message, job.attempt) == (None, None, 1)
        assert 0 < job.running_seconds < time.monotonic() - released
        (attempt,) = control_plane.attempts(job_id)
        assert attempt.begun_at is not None and (attempt.begun_at - attempt.created_at).total_seconds() > 4.0


@pytest.mark.parametrize(("wish", "phase"), [("suspend", JobPhase.SUSPENDED), ("cancel", JobPhase.CANCELLED)])
def test_suspend_and_cancel_act_at_once_on_a_job_in_the_engine_queue(
    control_plane: Plane, engine: Engine, wish: str, phase: JobPhase
) -> None:
    """At once, and not when the grace has passed that ranks would have to save."""
    engine.queued = True
    control_plane.start_reconciler(engine)
    job_id = control_plane.submit({"steps": 20}, policy={"stop_grace": 3600})
    control_plane.wait_job(job_id, lambda job: job.reason == "engine-queue", "told that it waits")
    control_plane.post(f"/v1/jobs/{job_id}/{wish}")
    control_plane.wait(job_id, phase)
    assert engine.waiting == {} and not processes_below(control_plane.paths.job(job_id).root)
    assert control_plane.job(job_id).running_seconds == 0.0 and control_plane.job(job_id).failures == 0
    if wish == "suspend":
        engine.queued = False
        control_plane.post(f"/v1/jobs/{job_id}/resume")
        assert control_plane.wait(job_id, JobPhase.SUCCEEDED).attempt == 2


def test_unreachable_engine_ends_no_attempt(control_plane: Plane, engine: Engine) -> None:
    control_plane.start_reconciler(engine)
    job_id = control_plane.submit(INTERRUPTED)
    pid = agent_pid(control_plane, job_id)
    engine.away = True
    control_plane.wait_job(job_id, lambda job: job.reason == "engine-unreachable", "told")
    assert "does not answer: connection refused" in str(control_plane.job(job_id).message)
    os.kill(pid, signal.SIGKILL)  # nobody can see it now
    wait_for(lambda: pid not in processes_below(control_plane.settings.home), "the agent to be gone", 30)
    other = control_plane.submit({"steps": 5})  # cannot be submitted now, and is not lost
    control_plane.wait_job(other, lambda job: job.phase is JobPhase.STARTING, "made an attempt")
    control_plane.wait_job(
        other, lambda _: any(e.type == "engine-unreachable" for e in control_plane.events(other)), "told, too"
    )
    assert control_plane.attempts(job_id)[0].ended_at is None and control_plane.attempts(other)[0].ended_at is None
    engine.away = False
    assert control_plane.wait(job_id, JobPhase.SUCCEEDED).attempt == 2
    assert control_plane.wait(other, JobPhase.SUCCEEDED).attempt == 1
    assert [e.type for e in control_plane.events(job_id)].count("engine-unreachable") == 1, (
        "told once, not in every round"
    )


def test_engine_end_is_the_cause_when_the_agent_left_no_result(control_plane: Plane, engine: Engine) -> None:
    control_plane.start_reconciler(engine)
    job_id = control_plane.submit(INTERRUPTED, policy={"max_failures": 0})
    pid = agent_pid(control_plane, job_id)
    engine.ends = (EngineEnd(Cause.NODE_LOST, "node n3 does not answer", 0),)
    os.kill(pid, signal.SIGKILL)
    control_plane.wait_job(job_id, lambda job: job.attempt == 2, "tried again")
    engine.ends = ()
    first = control_plane.attempts(job_id)[0]
    assert (first.cause, first.message) == (Cause.NODE_LOST, "node n3 does not answer")
    assert control_plane.job(job_id).preemptions == 1 and control_plane.job(job_id).failures == 0


def test_node_loss_stays_the_cause_when_the_agent_ends_by_its_fence(control_plane: Plane, engine: Engine) -> None:
    """As where a kubelet alone is silent: the pod trains on, and sees that the service has given the attempt up."""
    control_plane.start_reconciler(engine, Timing(lost=0.2))
    job_id = control_plane.submit(INTERRUPTED, policy={"max_failures": 0})
    agent_pid(control_plane, job_id)
    engine.ends = (EngineEnd(Cause.NODE_LOST, "Taint manager: deleting", 0),)
    engine.cut_off = True
    control_plane.wait_job(job_id, lambda job: job.attempt == 2, "tried again")
    engine.ends = ()
    first = control_plane.attempts(job_id)[0]
    assert first.cause is Cause.NODE_LOST and "Taint manager" in str(first.message), first.message
    assert control_plane.job(job_id).failures == 0


def test_slow_launcher_plan_does_not_block_slots_of_other_jobs(control_plane: Plane, engine: Engine) -> None:
    """It may be of others' making. Another reconciler lends slots meanwhile, and the job that was planned runs once."""
    engine.ponders = "slow"
    control_plane.start_reconciler(engine)
    slow = control_plane.submit({"steps": 3}, name="slow")
    assert engine.asked.wait(30)
    control_plane.start_reconciler()
    control_plane.wait(control_plane.submit({"steps": 3}), JobPhase.SUCCEEDED)
    control_plane.wait(slow, JobPhase.SUCCEEDED)
    engine.knows.set()
    control_plane.wait(control_plane.submit({"steps": 3}, name="slow"), JobPhase.SUCCEEDED)
    assert [attempt.number for attempt in control_plane.attempts(slow)] == [1]
    assert "another agent" not in control_plane.attempt_paths(slow, 1).agent_log.read_text()


def test_engine_end_explains_the_agents_sigterm(control_plane: Plane, engine: Engine) -> None:
    control_plane.start_reconciler(engine)
    job_id = control_plane.submit(INTERRUPTED)
    pid = agent_pid(control_plane, job_id)
    control_plane.wait(job_id, JobPhase.RUNNING)
    engine.ends = (EngineEnd(Cause.HIGHER_PRIORITY, "preempted for job 7"),)
    os.kill(pid, signal.SIGTERM)
    control_plane.wait_job(job_id, lambda job: job.attempt == 2, "tried again")
    first = control_plane.attempts(job_id)[0]
    assert first.cause is Cause.HIGHER_PRIORITY and str(first.message).startswith("preempted for job 7; ")
    assert first.steps_lost == 0


def test_reconciler_ends_orphaned_attempts_without_a_row(control_plane: Plane, engine: Engine) -> None:
    job_id = "job-00000000dead"
    paths = control_plane.paths.job(job_id)
    spec = JobSpec.model_validate({"name": "x", "task": {"entrypoint": "m:T"}, "env": {"TRAINER": '{"pause": 60}'}})
    resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python="python")
    launch: LaunchFile = build_launch_file(control_plane.paths, job_id, 1, spec, resolved, (), "t", Desired.RUN)
    engine.submit(engine.plan(launch))
    kept = control_plane.submit({"steps": 200, "pause": 0.02})
    wait_for(lambda: paths.attempt(1).agent_file.exists(), "the orphan to run", 30)
    control_plane.start_reconciler(engine)
    agent_pid(control_plane, kept)
    wait_for(lambda: not processes_below(paths.root), "the orphan to be ended", 30)
    assert control_plane.wait(kept, JobPhase.SUCCEEDED).attempt == 1


def test_job_without_an_available_launcher_shows_reason_no_launcher(
    control_plane: Plane, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "UNLAUNCHABLE_AFTER_SECONDS", 0.0)
    job_id = control_plane.submit({"steps": 5})
    with control_plane.database.write() as session:
        job = session.get_one(Job, job_id)
        job.spec = job.spec | {"launcher": {"kind": "slurm"}}
    control_plane.start_reconciler(engine)
    told = control_plane.wait_job(job_id, lambda job: job.reason == "no-launcher", "told that nobody has its launcher")
    assert told.phase is JobPhase.QUEUED and "launchers file" in str(told.message)
    with control_plane.database.write() as session:
        job = session.get_one(Job, job_id)
        job.spec = job.spec | {"launcher": {"kind": "local"}}
    assert control_plane.wait(job_id, JobPhase.SUCCEEDED).reason is None


@one_database
def test_launch_deadline_starts_after_the_queue_when_left_during_service_outage(
    control_plane: Plane, engine: Engine
) -> None:
    """The service was away for longer than that; the engine has just started the group when it comes back."""
    engine.queued = True
    first = control_plane.start_reconciler(engine)
    job_id = control_plane.submit({"steps": 5})
    control_plane.wait_job(job_id, lambda job: job.reason == "engine-queue", "told that it waits")
    first.stop()
    control_plane.reconcilers[0][1].join(30)
    with control_plane.database.write() as session:
        attempt = session.get_one(Attempt, (job_id, 1))
        attempt.created_at -= timedelta(hours=1)
    engine.queued, engine.starting = False, 5
    control_plane.start_reconciler(engine)
    control_plane.wait_job(job_id, lambda job: job.reason is None, "told that it does not wait any more")
    job = control_plane.wait(job_id, JobPhase.SUCCEEDED)
    assert (job.attempt, job.failures, [a.cause for a in control_plane.attempts(job_id)]) == (1, 0, [Cause.COMPLETED])


@one_database
def test_launch_deadline_starts_after_the_queue_when_left_during_engine_outage(
    control_plane: Plane, engine: Engine
) -> None:
    engine.queued = True
    control_plane.start_reconciler(engine, Timing(launch_deadline=3))
    job_id = control_plane.submit({"steps": 5})
    control_plane.wait_job(job_id, lambda job: job.reason == "engine-queue", "told that it waits")
    engine.away, begun = True, time.monotonic()
    wait_for(lambda: time.monotonic() - begun > 3.5, "the launch deadline to pass", 30)
    engine.queued, engine.starting, engine.away = False, 3, False
    assert control_plane.wait(job_id, JobPhase.SUCCEEDED).attempt == 1


@one_database
def test_engine_refusing_submissions_is_reported_and_retried_slowly(control_plane: Plane, engine: Engine) -> None:
    engine.closed = True
    control_plane.start_reconciler(engine)
    job_id = control_plane.submit({"steps": 5})
    control_plane.wait_job(
        job_id, lambda _: any(e.type == "engine-unreachable" for e in control_plane.events(job_id)), "told"
    )
    looks = engine.looks
    wait_for(lambda: engine.looks >= looks + 8, "more looks", 30)
    assert engine.submits <= 3, engine.submits
    engine.closed = False
    assert control_plane.wait(job_id, JobPhase.SUCCEEDED).attempt == 1


@one_database
def test_first_engine_end_stays_the_cause_when_no_longer_reported(control_plane: Plane, engine: Engine) -> None:
    control_plane.start_reconciler(engine)
    job_id = control_plane.submit(INTERRUPTED, policy={"max_failures": 0})
    pid = agent_pid(control_plane, job_id)
    engine.slow, engine.ends = 2, (EngineEnd(Cause.EVICTED, "the node ran out of disk", 0),)
    os.kill(pid, signal.SIGKILL)
    control_plane.wait_job(job_id, lambda job: job.attempt == 2, "tried again")
    assert control_plane.attempts(job_id)[0].cause is Cause.EVICTED


@one_database
def test_engine_end_of_the_attempt_is_the_cause_for_a_dead_agent(control_plane: Plane, engine: Engine) -> None:
    """The engine takes the others away more slowly than they are waited for."""
    control_plane.start_reconciler(engine, Timing(lost=0.2))
    job_id = control_plane.submit(INTERRUPTED, policy={"max_failures": 0})
    pid = agent_pid(control_plane, job_id)
    engine.held, engine.ends = True, (EngineEnd(Cause.HIGHER_PRIORITY, "preempted for job 7"),)
    os.kill(pid, signal.SIGKILL)
    control_plane.wait_job(job_id, lambda job: job.attempt == 2, "tried again")
    engine.held = False
    assert control_plane.attempts(job_id)[0].cause is Cause.HIGHER_PRIORITY
    assert control_plane.job(job_id).failures == 0


@one_database
def test_node_that_completes_early_does_not_end_the_other_nodes(
    control_plane: Plane, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank does on one node: rank 0 alone may evaluate or write for long after the others have left."""
    monkeypatch.setattr(LocalLauncher, "max_nodes", 2)
    control_plane.start_reconciler(engine, Timing(linger=0.5))
    pauses = {"0": 0.3, "1": 0.0}
    job_id = control_plane.submit({"steps": 12, "every": 4, "pauses": pauses}, world={"nodes": 2, "device": "cpu"})
    job = control_plane.wait(job_id, JobPhase.SUCCEEDED, JobPhase.FAILED)
    (attempt,) = control_plane.attempts(job_id)
    assert sorted(attempt.results) == ["0", "1"] and all(not r["secondary"] for r in attempt.results.values())
    assert (job.phase, job.step, job.attempt) == (JobPhase.SUCCEEDED, 12, 1)


def test_engine_jobs_need_no_local_slots_and_a_failing_plan_blocks_no_other(
    control_plane: Plane, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_queries, "EXAMINED_PER_OWNER", 2)
    engine.kind, engine.unplannable = "other", "broken"
    taken = control_plane.submit({"steps": 2000, "pause": 0.1})
    behind = [control_plane.submit(priority=5) for _ in range(3)]
    broken, job_id = control_plane.submit(name="broken", priority=9), control_plane.submit({"steps": 5})
    with control_plane.database.write() as session:
        session.get_one(Job, taken).priority = 9
        for each in (broken, job_id):
            job = session.get_one(Job, each)
            job.spec = job.spec | {"launcher": {"kind": "other"}}
    both = Launchers({"local": trainer_launcher(control_plane.paths), "other": engine})
    control_plane.start_reconciler_with(both)
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    assert all(control_plane.job(each).reason == "no-slot" for each in behind)
    told = control_plane.job(broken)
    assert (told.phase, told.reason) == (JobPhase.QUEUED, "launcher-error") and "namespace" in str(told.message)
    engine.unplannable = ""
    assert control_plane.wait(broken, JobPhase.SUCCEEDED).reason is None


def test_unplannable_job_keeps_its_reason_beside_a_reconciler_without_its_launcher(
    control_plane: Plane, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own reconciler tries it again and again, and logs the error once."""
    monkeypatch.setattr(launching, "UNLAUNCHABLE_AFTER_SECONDS", 0.0)
    engine.kind, engine.unplannable = "other", "broken"
    broken = control_plane.submit(name="broken")
    with control_plane.database.write() as session:
        job = session.get_one(Job, broken)
        job.spec = job.spec | {"launcher": {"kind": "other"}}
    own = control_plane.start_reconciler_with(Launchers({"other": engine}))
    control_plane.wait_job(broken, lambda job: job.reason == "launcher-error", "told that it cannot be planned")
    mark, marked = launching.AttemptLauncher.mark_unlaunchable_jobs, list[str | None]()

    def observed(launcher: launching.AttemptLauncher) -> None:
        mark(launcher)
        if launcher is not own._attempt_launcher:
            marked.append(control_plane.job(broken).reason)

    monkeypatch.setattr(launching.AttemptLauncher, "mark_unlaunchable_jobs", observed)
    control_plane.start_reconciler()
    wait_for(lambda: marked, "the other reconciler to look for jobs that nobody can launch", 30)
    control_plane.wake()
    engine.unplannable = ""
    control_plane.wait(broken, JobPhase.SUCCEEDED)
    assert marked[0] == "launcher-error" and "no-launcher" not in marked
    assert caplog.text.count("its launcher cannot plan attempt 1") == 1


def test_running_job_whose_launcher_was_removed_shows_reason_no_launcher(
    control_plane: Plane, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launchers file was edited while it ran; and a job that was tried before waits for the same launcher."""
    monkeypatch.setattr(launching, "UNLAUNCHABLE_AFTER_SECONDS", 0.0)
    first = control_plane.start_reconciler(engine)
    job_id, tried = control_plane.submit({"steps": 40, "pause": 0.05}), control_plane.submit({"steps": 5})
    agent_pid(control_plane, job_id)
    first.stop()
    control_plane.reconcilers[0][1].join(30)
    with control_plane.database.write() as session:
        job = session.get_one(Job, job_id)
        kind, job.spec = job.spec, job.spec | {"launcher": {"kind": "slurm"}}
    second = control_plane.start_reconciler(engine)
    control_plane.wait_job(job_id, lambda job: job.reason == "no-launcher", "told that nobody looks after it")
    second.stop()
    with control_plane.database.write() as session:
        session.get_one(Job, job_id).spec = kind
    control_plane.start_reconciler(engine)
    control_plane.wait_job(job_id, lambda job: job.reason is None, "told that somebody does")
    assert [control_plane.wait(each, JobPhase.SUCCEEDED).attempt for each in (job_id, tried)] == [1, 1]
