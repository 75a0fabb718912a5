"""A model of an agent with its rank: it begins, trains, commits real checkpoints, reports to the real ``ingest``, and fails.

It keeps the promises of the real agent (``agent.lock`` first, base.json before training, a spool line after each commit,
result.json last, ranks killed when a report is refused as stale) and no others. It may die between any two of these steps, or be
stopped and continue much later. Its reports may arrive late, twice, out of order or never, or stand between the two times at
which the service reads their attempt's rows.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import Conflict, NotFound, RatchetError, Refused
from ratchet_contract.paths import HomePaths, checkpoint_dir_name
from ratchet_contract.phases import AttemptPhase, Cause, Desired
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
from tests.support.sim.processes import HeldRequest, Process, Stage

STEPS: Final = 4
EVERY: Final = 2
_FAILURES: Final = (Cause.EXCEPTION, Cause.HANG, Cause.USER_ERROR, Cause.OOM)


class State(StrEnum):
    STARTING = "starting"  # the process exists, and does not hold its lock yet
    BEGUN = "begun"
    TRAINING = "training"
    RESULT = "result"  # its result is written, and the process still exists
    GONE = "gone"


@dataclass
class Agent:
    """The agent of an attempt's only node. ``ended``: the attempts (job id, number) that the service has ended, which grow.
    ``out_of_reach``: the engine reports it as dead, although it lives."""

    plan: LaunchPlan
    stage: Stage
    database: Database
    home: HomePaths
    ended: Set[tuple[str, int]]
    state: State = State.STARTING
    seen: bool = False
    stopped: bool = False  # SIGSTOP
    hangs: bool = False  # stopped until it is killed
    out_of_reach: bool = False
    terminated: bool = False  # it has received a SIGTERM
    lingers: int = 0  # kills that it survives
    orphans: int = 0  # kills that its ranks survive after its own end
    step: int = 0
    base: Base = field(default_factory=Base)
    control: Control = field(default_factory=Control)
    lines: list[RankMessage] = field(default_factory=list)
    acked: int = 0
    result: AttemptResult | None = None
    in_transit: list[AgentReport | Process] = field(default_factory=list)
    """Reports that arrive later; a process: the service has read the rows, and has not begun the transaction."""

    @property
    def ref(self) -> AttemptRef:
        return self.plan.ref

    @property
    def works(self) -> bool:
        """True if its ranks may train or write, also after its own death."""
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
        kind = self.stage.random.choice(("die", "stop", "hang", "failure", "lost"))
        trains = self.state is State.TRAINING
        if kind in ("stop", "hang"):
            self.stage.trace_line(f"{self.ref.name} {kind}s")
            self.stopped, self.hangs = True, kind == "hang"
        elif kind == "die" or self.state is State.STARTING:
            if trains and self.stage.chance(self.stage.faults.lingers):
                self.orphans = self.stage.random.randrange(1, 4)
            self.die("is killed, its ranks are not" if self.orphans else "is killed")
        elif kind == "failure" and self.state is not State.RESULT:
            self._end(self.stage.random.choice(_FAILURES))
        elif kind == "lost" and trains:
            self.step = min(STEPS, self.step + 1)
            self._commit("schedule", report=False)
            self.die("is killed after a commit")

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
        requested = self._requested_cause()
        if requested is not None:
            if self.step > self.parent.step and not self.stage.chance(self.stage.faults.agent):
                self._commit("stop")
            self._end(requested)
            return
        self.step = min(STEPS, self.step + 1)  # one that began at the last checkpoint has nothing left to do
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

    def _commit(self, reason: Any, *, report: bool = True) -> None:
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
        if report:
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
        """Write it to the disk before it is reported."""
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
        """Send what is not acknowledged. It may be lost, arrive twice or late, or stand between two reads of the service."""
        phase = AttemptPhase.STOPPING if self.state is State.RESULT else AttemptPhase.RUNNING
        batch = RankBatch(rank=0, from_seq=self.acked + 1, messages=self.lines[self.acked :][:1000])
        made = AgentReport(
            job_id=self.ref.job_id, attempt=self.ref.attempt, phase=phase, last_step=self.step,
            batches=[batch] if batch.messages else [], result=self.result,
        )  # fmt: skip
        if not self.stage.chance(self.stage.faults.lost):
            self.deliver(made)
            return
        fate = self.stage.random.choice(("lost", "late", "unanswered", "twice", "held"))
        self.stage.trace_line(f"{self.ref.name}: a report is {fate}")
        if fate == "late":
            self.in_transit.append(made)
        elif fate == "held":
            held = HeldRequest(f"report of {self.ref.name}", lambda: self.deliver(made, answered=False), self.stage)
            held.turn()
            self.in_transit += [held] if held.stalled else []
        elif fate != "lost":
            self.deliver(made, answered=fate == "twice")
            if fate == "twice":
                self.deliver(made)

    def deliver_pending(self) -> None:
        """A report in transit arrives, or its transaction begins."""
        made = self.in_transit.pop(self.stage.random.randrange(len(self.in_transit)))
        if isinstance(made, AgentReport):
            self.deliver(made, answered=False)
        else:
            made.turn()
            made.end()

    def deliver(self, report: AgentReport, *, answered: bool = True) -> None:
        """The service receives the report; ``answered``: the agent receives the answer."""
        try:
            ack = ingest(self.database, report, self.plan.launch.report_token, self.home)
        except (Conflict, NotFound, Refused) as error:
            self._denied(error, answered)
            return
        assert (self.ref.job_id, self.ref.attempt) not in self.ended, (
            f"a report of {self.ref.name} is accepted after its end"
        )
        if answered and self.state is not State.GONE and not self.stopped:
            self.acked = max(self.acked, ack.acked.get(0, 0))
            self.control = ack.control

    def _denied(self, error: RatchetError, answered: bool) -> None:
        if error.code not in ("stale-attempt", "job-not-found", "attempt-not-found", "token-wrong"):
            raise error
        if answered and self.state in (State.BEGUN, State.TRAINING) and not self.stopped:
            self.stage.trace_line(f"{self.ref.name} is refused ({error.code}): it ends")
            self._end(Cause.LEASE_LOST)
