"""A launcher whose agents are ``Agent`` models: idempotent by name, slow to kill, at times unreachable, with points at calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec
from ratchet_service.db.engine import Database
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers.base import AttemptRef, AttemptState, EngineUnreachable, LaunchPlan, NodeState
from tests.support.sim.agents import Agent, State
from tests.support.sim.checks import check_backoff_is_over, check_row_exists
from tests.support.sim.processes import Stage


class SimLauncher:
    """The engine: one object for all reconcilers."""

    kind = "local"
    max_nodes: int | None = 1
    slots = True
    same_files = True
    excludes_nodes = False

    def __init__(self, stage: Stage, database: Database, home: HomePaths) -> None:
        self._stage, self._database, self._home = stage, database, home
        self.agents: list[Agent] = []
        self.ended: set[tuple[str, int]] = set()
        """The attempts (job id, number) that the service has ended, of jobs that are not deleted."""

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        return [], []

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        check_backoff_is_over(self._database, launch.job_id)
        ref = AttemptRef(launch.job_id, launch.attempt, AttemptPaths(Path(launch.attempt_dir)), 1)
        return LaunchPlan(ref=ref, launch=launch, argv=("agent",))

    def submit(self, plan: LaunchPlan) -> None:
        check_row_exists(self._database, plan.ref)
        self._call(f"submit {plan.ref.name}")
        if not any(agent.seen or agent.state is not State.GONE for agent in self._of(plan.ref)):
            attempt_files.write_launch(plan.ref.paths, plan.launch)
            self._stage.point(f"half way through submit {plan.ref.name}", stall=0.0)
            self._stage.trace_line(f"{plan.ref.name} is submitted")
            self.agents.append(Agent(plan, self._stage, self._database, self._home, self.ended))
        self._stage.point(f"after submit {plan.ref.name}")

    def poll(self, ref: AttemptRef) -> AttemptState:
        if self._stage.running is not None and self._stage.chance(self._stage.faults.away):
            raise EngineUnreachable("the engine does not answer")
        self._stage.point(f"after poll {ref.name}")
        found = self._of(ref)
        node = next((agent.node() for agent in found if agent.seen), NodeState())
        return AttemptState(any(agent.state is not State.GONE and not agent.out_of_reach for agent in found), (node,))

    def stop(self, ref: AttemptRef, grace: float) -> None:
        self._call(f"stop {ref.name}")
        for agent in self._of(ref):
            agent.terminated = True

    def kill(self, ref: AttemptRef) -> list[str]:
        self._call(f"kill {ref.name}")
        left = []
        for agent in self._of(ref):
            if agent.orphans:
                agent.orphans -= 1
                left.append(f"ranks of {ref.name}")
            if agent.state is State.GONE or agent.out_of_reach:
                continue
            if agent.lingers == 0 and self._stage.chance(self._stage.faults.lingers):
                if self._stage.chance(0.5):  # the engine reports that its node is lost, and the node lives
                    self._stage.trace_line(f"{ref.name} is out of reach and given up")
                    agent.out_of_reach, agent.stopped, agent.hangs = True, False, False
                    continue
                agent.lingers = self._stage.random.randrange(1, 4)
            if agent.lingers > 0:
                agent.lingers -= 1
                left.append(f"process of {ref.name}")
                agent.stopped = True  # in a system call that does not end
                continue
            agent.die("is killed by the launcher")
        self._stage.point(f"after kill {ref.name}")
        return left

    def logs(self, ref: AttemptRef, limit: int) -> str:
        return ""

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> Sequence[str]:
        running = {agent.ref.name for agent in self.agents if agent.state is not State.GONE and not agent.out_of_reach}
        orphans = sorted(running - set(known(running))) if running else []
        for agent in self.agents:
            if agent.ref.name in orphans and agent.state is not State.GONE:
                agent.die("is swept away")
        return orphans

    def _of(self, ref: AttemptRef) -> list[Agent]:
        return [agent for agent in self.agents if agent.ref == ref]

    def _call(self, what: str) -> None:
        self._stage.point(f"before {what}", stall=4.0)
        if self._stage.chance(self._stage.faults.away):
            raise EngineUnreachable("the engine does not answer")
