"""A model of an agent with its rank: it begins, trains, commits real checkpoints, reports to the real ``ingest``, and fails.

It keeps the promises that the real one keeps (``agent.lock`` before anything else, base.json before training, a spool line
behind each commit, result.json last, ranks killed when a report is refused as stale) and none besides: it may die between any
two of them, be stopped and go on much later, and what it has sent may arrive late, twice, out of order or never.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import Conflict, NotFound, RatchetError, Refused
from ratchet_contract.paths import HomePaths, checkpoint_dir_name
from ratchet_contract.phases import AttemptPhase, Cause, Desired, Outcome
from ratchet_contract.protocol.messages import (
    AgentFile,
    AgentReport,
    AttemptResult,
    CheckpointCommitted,
    Control,
    Progress,
    RankBatch,
    RankMessage,
    Started,
    Training,
)
from ratchet_service.agent_reports.ingest import ingest
from ratchet_service.db.engine import Database
from ratchet_service.launchers.base import AttemptRef, LaunchPlan, NodeState
from ratchet_store.read.find_base import find_base
from tests.support.checkpoints import manifest_of, write_ranks
from tests.support.one_shot_writers import commit
from tests.support.sim.processes import Stage

STEPS: Final = 12
EVERY: Final = 3


class State(StrEnum):
    STARTING = "starting"  # a process is there, its lock is not
    BEGUN = "begun"
    TRAINING = "training"
    RESULT = "result"  # its last word is written, the process is still there
    GONE = "gone"


@dataclass
class Agent:
    """One node's agent. ``out_of_reach``: the engine has given it up for dead; it does not know that."""

    plan: LaunchPlan
    stage: Stage
    database: Database
    home: HomePaths
    state: State = State.STARTING
    seen: bool = False
    stopped: bool = False  # SIGSTOP
    out_of_reach: bool = False
    terminated: bool = False  # SIGTERM has come
    lingers: int = 0  # looks for which it survives a SIGKILL
    orphans: int = 0  # the same of ranks that it has left behind
    step: int = 0
    base: Base = field(default_factory=Base)
    control: Control = field(default_factory=Control)
    lines: list[RankMessage] = field(default_factory=list)
    acked: int = 0
    result: AttemptResult | None = None
    refused: bool = False
    flying: list[AgentReport] = field(default_factory=list)

    @property
    def ref(self) -> AttemptRef:
        return self.plan.ref

    @property
    def works(self) -> bool:
        """It holds its lock, and its ranks may train or write; or it has died, and they still do."""
        return self.state in (State.BEGUN, State.TRAINING) or self.orphans > 0

    def node(self) -> NodeState:
        if not self.seen:
            return NodeState()
        agent = AgentFile(pid=1, start_time=1, host="sim")
        return NodeState(True, self.state is State.GONE or self.out_of_reach, agent, self.result)

    def act(self) -> None:
        """One move of the process."""
        if self.stopped or self.state is State.GONE:
            return
        if self.stage.chance(self.stage.faults.agent):
            self._fail()
        elif self.state is State.STARTING:
            self._begin()
        elif self.state is State.BEGUN:
            self._start_training()
        elif self.state is State.TRAINING:
            self._train()
        else:
            self.die("ends")

    def die(self, why: str) -> None:
        self.stage.trace_line(f"{self.ref.name} {why}")
        self.state = State.GONE

    def _fail(self) -> None:
        kind = self.stage.random.choice(("die", "stop", "exception", "mute"))
        if kind == "die" or self.state is State.STARTING:
            if self.state is State.TRAINING and self.stage.chance(self.stage.faults.lingers):
                self.orphans = self.stage.random.randrange(1, 4)
            self.die("is killed, its ranks are not" if self.orphans else "is killed")
        elif kind == "stop":
            self.stage.trace_line(f"{self.ref.name} is stopped")
            self.stopped = True
        elif kind == "exception" and self.state in (State.BEGUN, State.TRAINING):
            self._end(Cause.EXCEPTION)
        elif kind == "mute" and self.state is State.TRAINING:
            self._commit("schedule", tell=False)
            self.die("is killed behind a commit")

    def _begin(self) -> None:
        if self.ref.paths.fence_file.exists():
            self.die("finds that its attempt is over")
            return
        self.state, self.seen = State.BEGUN, True
        self.stage.trace_line(f"{self.ref.name} begins")

    def _start_training(self) -> None:
        job = self.home.job(self.ref.job_id)
        launch = self.plan.launch
        found, _ = find_base(
            job.checkpoints, job.quarantine, launch.lineage, expected_job_id=launch.job_id, check=lambda *_: None
        )
        self.base = Base() if found is None else found.base
        self.step, self.parent = self.base.step, self.base
        self.ref.paths.base_file.write_text(self.base.model_dump_json())
        self._spool_message(Started(rank=0, pid=1, host="sim", at=self._at(), device="cpu", torch="none"))
        self._spool_message(Training(rank=0, at=self._at(), base=self.base, total_steps=STEPS))
        self.state = State.TRAINING
        self.stage.trace_line(f"{self.ref.name} trains from {self.base.step}.{self.base.attempt}")

    def _train(self) -> None:
        wish = self._requested_cause()
        if wish is not None:
            if self.step > self.parent.step and not self.stage.chance(self.stage.faults.agent):
                self._commit("stop")
            self._end(wish)
            return
        self.step += 1
        last = self.step >= STEPS
        if self.step % EVERY == 0 or last:
            self._commit("end" if last else "schedule")
            self._spool_message(Progress(rank=0, at=self._at(), step=self.step, total_steps=STEPS))
        if last:
            self._end(Cause.COMPLETED)

    def _requested_cause(self) -> Cause | None:
        if self.terminated:
            return Cause.SIGTERM
        return None if self.control.desired is Desired.RUN else self.control.cause

    def _commit(self, reason: Any, *, tell: bool = True) -> None:
        if self.parent.step == self.step and self.parent.attempt == self.ref.attempt:
            return
        finished = self.step >= STEPS
        folder = self.home.job(self.ref.job_id).checkpoints
        directory = folder / checkpoint_dir_name(self.step, self.ref.attempt)
        ranks = write_ranks(directory, world_size=1, seed=self.step)
        manifest = manifest_of(self.step, self.ref.attempt, *ranks, parent=self.parent, job_id=self.ref.job_id)
        made = commit(directory, manifest.model_copy(update={"finished": finished, "reason": reason}))
        self.stage.trace_line(f"{self.ref.name} commits step {self.step}")
        parent, self.parent = self.parent, made.base
        if tell:
            self._spool_message(
                CheckpointCommitted(
                    rank=0, at=self._at(), step=self.step, attempt=self.ref.attempt, digest=made.digest, size=made.size,
                    files=1, seconds=0.1, reason=reason, parent=parent, finished=finished,
                )
            )  # fmt: skip

    def _end(self, cause: Cause) -> None:
        self.result = AttemptResult(
            job_id=self.ref.job_id, attempt=self.ref.attempt, cause=cause, last_step=self.step, base=self.base,
            started_at=self._at(), ended_at=self._at(), ranks=[],
        )  # fmt: skip
        self.state = State.RESULT
        self.stage.trace_line(f"{self.ref.name} has ended with {cause}")

    def _spool_message(self, message: RankMessage) -> None:
        """On the disk first."""
        self.lines.append(message)
        spool = self.ref.paths.spool(0)
        if len(self.lines) == 1:
            spool.parent.mkdir(parents=True, exist_ok=True)
        with spool.open("a") as handle:
            handle.write(message.model_dump_json() + "\n")

    def _at(self) -> str:
        return self.stage.clock.now().isoformat()

    # --- reports -------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Send what is not acknowledged; it may be lost, come twice, or come late."""
        phase = AttemptPhase.STOPPING if self.state is State.RESULT else AttemptPhase.RUNNING
        batch = RankBatch(rank=0, from_seq=self.acked + 1, messages=self.lines[self.acked :][:1000])
        made = AgentReport(
            job_id=self.ref.job_id, attempt=self.ref.attempt, phase=phase, last_step=self.step,
            batches=[batch] if batch.messages else [], result=self.result,
        )  # fmt: skip
        if self.stage.chance(self.stage.faults.lost):
            fate = self.stage.random.choice(("lost", "late", "unheard", "twice"))
            self.stage.trace_line(f"{self.ref.name}: a report is {fate}")
            if fate == "late":
                self.flying.append(made)
            if fate in ("unheard", "twice"):
                self.deliver(made, heard=fate == "twice")
            if fate != "twice":
                return
        self.deliver(made)

    def deliver(self, report: AgentReport, *, heard: bool = True) -> None:
        """Now the service has it; ``heard``: and the agent its answer."""
        try:
            ack = ingest(self.database, report, self.plan.launch.report_token, self.home)
        except (Conflict, NotFound, Refused) as error:
            self._denied(error, heard)
            return
        if self.refused:
            raise AssertionError(f"{self.ref.name} was refused once, and is listened to again")
        if heard and self.state is not State.GONE and not self.stopped:
            self.acked = max(self.acked, ack.acked.get(0, 0))
            self.control = ack.control

    def _denied(self, error: RatchetError, heard: bool) -> None:
        if error.code not in ("stale-attempt", "job-not-found", "attempt-not-found", "token-wrong"):
            raise error
        if error.code == "stale-attempt":
            self.refused = True
        if heard and self.state in (State.BEGUN, State.TRAINING) and not self.stopped:
            self.stage.trace_line(f"{self.ref.name} is refused ({error.code}): it ends")
            self._end(Cause.LEASE_LOST)


def counts(cause: Cause) -> bool:
    """Whether an attempt with that end has failed."""
    return cause.outcome in (Outcome.FAILED, Outcome.LOST)
