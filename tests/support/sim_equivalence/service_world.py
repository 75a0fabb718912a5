"""The fast lane's schedule over the real service: real rounds of real reconcilers, real rows, real files.

``Served`` is ``sim_in_memory.world.World`` with nothing but its users, agents, engine, network and choices left: what that class
has of rows and of a reconciler is the product's here. So one seed moves both in the same way for as long as both do the same; a
reconciler that calls the engine once more, or in another order, draws other numbers from there on.

The disk is brought up to what the agents have written before the service looks at it. Left out: whose report token it is (an
agent sends the one that counts now).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sqlalchemy as sa

from ratchet_contract.api.quotas import EVERYBODY
from ratchet_contract.api.requests import ResumeRequest
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.paths import AttemptPaths, HomePaths, checkpoint_dir_name
from ratchet_contract.phases import Cause, Desired, Event
from ratchet_contract.protocol.messages import (
    AgentFile,
    AgentReport,
    AttemptResult,
    CheckpointCommitted,
    LaunchFile,
    Progress,
    RankBatch,
    RankEnd,
    RankMessage,
    Started,
    Training,
)
from ratchet_service.agent_reports.ingest import ingest
from ratchet_service.checkpoints.lineage import committed_in_lineage
from ratchet_service.db import leases
from ratchet_service.db.models import Attempt, Job, Quota
from ratchet_service.job_files import delete_job
from ratchet_service.launchers.base import AttemptRef, AttemptState, EngineUnreachable, LaunchPlan, NodeState
from ratchet_service.launchers.registry import Launchers
from ratchet_service.reconciler.background_work import in_caller
from ratchet_service.reconciler.loop import Reconciler
from ratchet_service.scheduling.scheduler import Preemption
from ratchet_service.scheduling.slots import Capacity
from ratchet_service.usecases import job_actions, submit
from tests.support import invariants
from tests.support.api import FakeSubmission, spec
from tests.support.checkpoints import manifest_of, write_ranks
from tests.support.one_shot_writers import commit
from tests.support.sim.processes import QUIET, Process, SimDatabase, Stage
from tests.support.sim.world import empty_stage
from tests.support.sim_equivalence.histories import Kept, of_rows
from tests.support.sim_in_memory.agents import Agent, Report, Result
from tests.support.sim_in_memory.database import CPUS, LEASE, STEPS
from tests.support.sim_in_memory.launching import CALL, END, LIMITS, MIN_RUN
from tests.support.sim_in_memory.reconciler import TIMING

_AGENT = AgentFile(pid=1, start_time=1, host="sim")


@cache
def _prepared(ranks: int, priority: int) -> submit.Prepared:
    policy = {"backoff": 0.5, "max_failures": 4, "stop_grace": 5.0, "timeout": LIMITS.timeout}
    data = spec(
        name="sim", hook={"name": "allreduce"}, world={"ranks_per_node": ranks, "device": "cpu"}, policy=policy,
        priority=priority, checkpoint={"keep_last": 10_000},
    )  # fmt: skip
    return submit.prepare(data, FakeSubmission())


_free_jobs = leases.free_jobs


def _in_order(*asked: Any) -> list[leases.Free]:
    """The database gives them as it finds them; which of them a reconciler looks at first must not differ here."""
    return sorted(_free_jobs(*asked), key=lambda free: free.job_id)


class Served(Kept):
    def __init__(self, seed: int, database: SimDatabase, folder: Path) -> None:
        self.stage = database.stage = Stage(seed, QUIET, database.time)
        self.database, self.homes = database, HomePaths(folder)
        self._tokens_of: dict[tuple[str, int], str] = {}
        self._written: dict[int, int] = {}
        self._made: dict[tuple[str, int, int | None], Base] = {}
        self._held: dict[int, tuple[Process, list[Any]]] = {}
        self._patches = ExitStack()
        super().__init__(seed)
        empty_stage(database, self.homes)
        if self.limit("ada").jobs is not None:
            with database.write() as session:
                limit = self.limit("ada")
                session.add(Quota(owner=EVERYBODY, jobs=limit.jobs, updated_at=self.now))
        self._patches.enter_context(patch.object(leases, "owner_is_dead", self._is_dead))
        self._patches.enter_context(patch.object(leases, "free_jobs", _in_order))

    def _is_dead(self, owner: str | None) -> bool:
        return self.same_host and owner in self.dead

    def advance_time(self, seconds: float) -> None:
        super().advance_time(seconds)
        self.stage.clock.elapsed = self.t

    def close(self) -> None:
        for process, _ in self._held.values():
            process.end()
        self._patches.close()
        super().close()

    # --- reconcilers ---------------------------------------------------------------------------------------------------

    def _start_reconciler(self) -> None:
        self._started += 1
        name = f"reconciler {self._started}"
        with patch.object(leases, "new_owner", lambda: name):
            made = Reconciler(
                self.database, self.homes, Launchers({"local": Calls(self)}), Capacity(cpus=CPUS), timing=TIMING,
                lease_seconds=LEASE, preemption=Preemption("any", MIN_RUN), start=in_caller,
            )  # fmt: skip
        self.reconcilers.append(Standing(name, made, self))  # type: ignore[arg-type]

    # --- users ---------------------------------------------------------------------------------------------------------

    def _store_job(self, job_id: str, owner: str, priority: int, ranks: int) -> None:
        with patch.object(submit, "new_job_id", lambda: job_id), self.database.write() as session:
            submit.store(session, _prepared(ranks, priority), owner)

    def all_jobs(self) -> list[Any]:
        with self.database.read() as session:
            return list(session.scalars(sa.select(Job).order_by(Job.created_at, Job.id)))

    def act(self, job: Any, event: Event) -> None:
        with self.database.write() as session:
            if event is Event.RESUME:
                prepared = job_actions.PreparedResume(ResumeRequest(), None, [])
                job_actions.resume(session, job.id, prepared, FakeSubmission(), self.homes)
            else:
                job_actions.apply_action(session, job.id, event)

    def _ask_checkpoint(self, job: Any) -> None:
        with self.database.write() as session:
            job_actions.request_checkpoint(session, job.id)

    def _resume_from(self, job: Any) -> None:
        self.sync_disk()
        if job.phase.active:
            return
        with self.database.write() as session:
            there = committed_in_lineage(session, session.get_one(Job, job.id))
            if there:
                request = ResumeRequest(from_step=there[self.draw_index(len(there))].step)
                prepared = job_actions.PreparedResume(request, None, [])
                job_actions.resume(session, job.id, prepared, FakeSubmission(), self.homes)

    def _delete(self, job: Any) -> None:
        history = of_rows(self.database, job.id)
        delete_job.delete(self.database, job.id, homes=self.homes)
        self.kept[job.id] = history

    def histories(self) -> dict[str, list[str]]:
        return self.kept | {job.id: of_rows(self.database, job.id) for job in self.all_jobs()}

    def check_end(self) -> None:
        faults = invariants.check_database(self.database, CPUS)
        assert not faults, "; ".join(faults)

    # --- reports -------------------------------------------------------------------------------------------------------

    def attempt(self, job_id: str, number: int) -> Any:
        with self.database.read() as session:
            return session.get(Attempt, (job_id, number))

    def known(self, job_id: str) -> bool:
        with self.database.read() as session:
            return session.get(Job, job_id) is not None

    def admit(self, report: Report, *, held: bool = False) -> Any:
        """One that is held stands before its transaction, listened to already; the others come at once, as a whole."""
        if not held:
            return None
        self.sync_disk()
        answer: list[Any] = []
        process = Held("a report", lambda: answer.append(self._ingested(report)), self.stage)
        process.turn()
        self._held[id(report)] = process, answer
        return None

    def ingest(self, report: Report) -> tuple[int, Desired, Cause | None]:
        process, answer = self._held.pop(id(report), (None, []))
        self.sync_disk()
        if process is None:
            return self._ingested(report)
        if answer:  # it had no news, and nothing to stand before: the model looks at it again
            process.end()
            return self._ingested(report)
        process.turn()
        process.end()
        return answer[0]  # type: ignore[no-any-return]

    def _ingested(self, report: Report) -> tuple[int, Desired, Cause | None]:
        key = report.job_id, report.attempt
        lines = [self._line(report.job_id, line) for line in report.messages]
        batches = [RankBatch(rank=0, from_seq=report.from_seq, messages=lines)] if lines else []
        told = AgentReport(
            job_id=report.job_id, attempt=report.attempt, phase=report.phase, last_step=report.last_step, batches=batches,
            result=None if report.result is None else self.result(*key, report.result),
        )  # fmt: skip
        ack = ingest(self.database, told, self._tokens_of[key], self.homes)
        return ack.acked.get(0, 0), ack.control.desired, ack.control.cause

    def result(self, job_id: str, attempt: int, said: Result) -> AttemptResult:
        return AttemptResult(
            job_id=job_id, attempt=attempt, cause=said.cause, last_step=said.last_step, started_at=said.ended_at,
            ended_at=said.ended_at, ranks=[RankEnd(rank=0, exit_code=0, last_step=said.last_step)],
        )  # fmt: skip

    # --- the disk ------------------------------------------------------------------------------------------------------

    def sync_disk(self) -> None:
        """To what the agents have written: each line, base, commit and agent's file once."""
        for job_id, places in self.disk.items():
            for place, finished in places.items():
                if (job_id, *place) not in self._made and job_id not in self.kept:
                    self._commit(job_id, *place, finished)
        for agent in self.engine.agents:
            if agent.seen and agent.job_id not in self.kept:
                done = self._written.get(id(agent), -1)
                if done < len(agent.lines):
                    self._write(agent, done)
                    self._written[id(agent)] = len(agent.lines)

    def _write(self, agent: Agent, done: int) -> None:
        """``done``: lines that are there; -1: nothing is."""
        paths = self.homes.job(agent.job_id).attempt(agent.attempt)
        if done < 0:
            paths.spool(0).parent.mkdir(parents=True, exist_ok=True)
            file, at = paths.node(0).agent_file, agent.begun_at
            assert at is not None
            file.write_text(_AGENT.model_dump_json())
            os.utime(file, (at.timestamp(), at.timestamp()))
        if done <= 0 and agent.lines:
            paths.base_file.write_text(self._base(agent.job_id, *agent.base).model_dump_json())
        with paths.spool(0).open("a") as spool:
            for line in agent.lines[max(0, done) :]:
                spool.write(self._line(agent.job_id, line).model_dump_json() + "\n")

    def _base(self, job_id: str, step: int, attempt: int | None) -> Base:
        return Base() if attempt is None else self._made[job_id, step, attempt]

    def _commit(self, job_id: str, step: int, attempt: int, finished: bool) -> None:
        folder = self.homes.job(job_id).checkpoints
        directory = folder / checkpoint_dir_name(step, attempt)
        ranks = write_ranks(directory, world_size=1, seed=step)
        agent = next(one for one in self.engine.agents if (one.job_id, one.attempt) == (job_id, attempt) and one.seen)
        older = [place for place in self.disk[job_id] if place[1] == attempt and place[0] < step]
        parent = self._base(job_id, *max(older, default=agent.base))
        manifest = manifest_of(step, attempt, *ranks, parent=parent, job_id=job_id)
        self._made[job_id, step, attempt] = commit(directory, manifest.model_copy(update={"finished": finished})).base

    def _line(self, job_id: str, line: tuple[Any, ...]) -> RankMessage:
        kind, at = line[0], self.now.isoformat()
        if kind == "started":
            return Started(rank=0, pid=1, host="sim", at=at, device="cpu", torch="none")
        if kind == "training":
            _, step, of, began = line
            return Training(rank=0, at=began.isoformat(), base=self._base(job_id, step, of), total_steps=STEPS)
        if kind == "progress":
            return Progress(rank=0, at=at, step=line[1], total_steps=STEPS)
        _, step, of, finished = line
        made = self._made[job_id, step, of]
        return CheckpointCommitted(
            rank=0, at=at, step=step, attempt=of, digest=made.digest or "", size=1, files=1, seconds=0.1, reason="schedule",
            parent=Base(), finished=finished,
        )  # fmt: skip

    # --- the engine ----------------------------------------------------------------------------------------------------

    def submitted(self, plan: LaunchPlan) -> None:
        self._tokens_of[plan.ref.job_id, plan.ref.attempt] = plan.launch.report_token


class Held(Process):
    """A report that stands between the service's first look at it and its transaction."""

    def point(self, where: str, *, stall: float = 1.0) -> None:
        if where == "before a transaction" and self.stalled is None and sys.exception() is None:
            self.pause(where)


class Standing:
    """A reconciler's process as the world has it: runs to the next call of the engine, or the end of its round."""

    def __init__(self, name: str, made: Reconciler, world: Served) -> None:
        self.name, self.watches, self._world = name, made._watches, world
        self._process = Process(name, lambda: made.run_round() and None, world.stage)
        self.points = self

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self._world.sync_disk()
        self._process.turn()
        if self._process.dead:
            raise StopIteration
        return CALL if self._process.stalled else END

    def close(self) -> None:
        self._process.end()


class Calls:
    """The launcher that a reconciler has: the model's engine behind it. A process may be left standing at each call."""

    kind = "local"
    max_nodes: int | None = 1
    slots = True
    same_files = True

    def __init__(self, world: Served) -> None:
        self._w = world
        self._proved: tuple[str, int] | None = None

    def check(self, spec: Any) -> tuple[list[Any], list[Any]]:
        return [], []

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        ref = AttemptRef(launch.job_id, launch.attempt, AttemptPaths(Path(launch.attempt_dir)), 1)
        return LaunchPlan(ref=ref, launch=launch, argv=("agent",))

    def submit(self, plan: LaunchPlan) -> None:
        self._w.submitted(plan)
        self._stand()
        if self._w.rnd() < self._w.faults.away:
            raise EngineUnreachable("the engine does not answer")
        self._w.engine.submit(plan.ref.job_id, plan.ref.attempt, plan.launch.lineage)
        self._stand()

    def poll(self, ref: AttemptRef) -> AttemptState:
        """The look behind the proof of death belongs to it."""
        key = ref.job_id, ref.attempt
        if self._proved == key:
            self._proved = None
            return self._seen(key)
        if self._w.rnd() < self._w.faults.away:
            raise EngineUnreachable("the engine does not answer")
        found = self._seen(key)
        self._stand()
        return found

    def _seen(self, key: tuple[str, int]) -> AttemptState:
        found = self._w.engine.poll(key)
        nodes = []
        for node in found.nodes:
            said: Any = node.result
            result = None if said is None else self._w.result(*key, said)
            nodes.append(NodeState(node.seen, node.gone, _AGENT if node.seen else None, result))
        return AttemptState(found.alive, tuple(nodes))

    def stop(self, ref: AttemptRef, grace: float) -> None:
        self._stand()
        self._w.engine.stop((ref.job_id, ref.attempt))
        self._stand()

    def kill(self, ref: AttemptRef) -> list[str]:
        key = ref.job_id, ref.attempt
        self._w.fence(key)
        self._stand()
        left = self._w.engine.kill(key)
        self._stand()
        self._proved = None if left else key
        return left

    def logs(self, ref: AttemptRef, limit: int) -> str:
        return ""

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> Sequence[str]:
        running = {agent.name for agent in self._w.engine.live()}
        there = set(known(running)) if running else running
        return self._w.engine.sweep(lambda agent: agent.name in there)

    def _stand(self) -> None:
        running = self._w.stage.running
        if running is not None:
            running.pause("at a call")
