"""The model's engine and its agents: they keep the promises of the real ones (see ``tests.support.sim``), and none besides.

What an agent has on its disk outlives it: its spool, its base, its commits, its result. Its reports may be lost, come twice,
come late, or stand between the two looks that the service takes at a report.

Left out: a commit of an attempt that was given up for dead, between its fence and the next attempt's choice of a base. By the
rules of lineage the next attempt may begin from such a checkpoint, which is a valid one; no row knows it before that one's end.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from ratchet_contract.checkpoint.resume_report import lineage_contains
from ratchet_contract.errors import Conflict, NotFound
from ratchet_contract.phases import AttemptPhase, Cause, Desired
from ratchet_service.launchers.base import AttemptState, NodeState
from tests.support.sim_in_memory.database import STEPS, Report, make_base

EVERY: Final = 2
STARTING, BEGUN, TRAINING, RESULT, GONE = range(5)
NOTHING: Final = AttemptState(False, (NodeState(),))
UNBEGUN: Final = AttemptState(True, (NodeState(),))


class Result:
    """What ``attempt_cause.combine_ends`` and ``verdict`` look at of an ``AttemptResult``."""

    __slots__ = (
        "began_at", "cause", "ended_at", "exit_code", "last_step", "message", "node", "rank", "ranks", "secondary",
    )  # fmt: skip

    def __init__(self, cause: Cause, last_step: int, ended_at: str) -> None:
        self.cause, self.last_step, self.ended_at = cause, last_step, ended_at
        self.node, self.secondary, self.ranks = 0, False, (0,)
        self.began_at = self.message = self.rank = self.exit_code = None


class Agent:
    __slots__ = (
        "acked",
        "attempt",
        "base",
        "begun_at",
        "control",
        "deaf",
        "flying",
        "job_id",
        "lines",
        "lingers",
        "orphans",
        "out_of_reach",
        "parent",
        "refused",
        "result",
        "seen",
        "seen_state",
        "segments",
        "state",
        "step",
        "stopped",
        "terminated",
        "w",
    )  # fmt: skip

    def __init__(self, world: Any, job_id: str, attempt: int, segments: Any) -> None:
        self.w, self.job_id, self.attempt, self.segments = world, job_id, attempt, segments
        self.state = STARTING
        self.lines: list[Any] = []
        self.flying: list[tuple[Report, bool]] = []
        self.control: tuple[Desired, Cause | None] = (Desired.RUN, None)
        self.seen = self.stopped = self.deaf = self.out_of_reach = self.terminated = self.refused = False
        self.lingers = self.orphans = self.step = self.acked = 0
        self.base: tuple[int, int | None] = (0, None)
        self.parent = self.base
        self.result: Result | None = None
        self.begun_at: datetime | None = None
        self.seen_state: AttemptState | None = None

    @property
    def name(self) -> str:
        return f"{self.job_id}-a{self.attempt:04d}"

    @property
    def works(self) -> bool:
        return self.state in (BEGUN, TRAINING) or self.orphans > 0

    def observed_state(self) -> AttemptState:
        """What the engine and the files say of it; kept until it changes."""
        if self.seen_state is None:
            gone = self.state == GONE or self.out_of_reach
            self.seen_state = AttemptState(not gone, (NodeState(True, gone, None, self.result),))  # type: ignore[arg-type]
        return self.seen_state

    def become(self, state: int) -> None:
        self.state, self.seen_state = state, None

    def act(self) -> None:
        w = self.w
        if self.stopped or self.state == GONE:
            return
        if w.rnd() < w.faults.agent:
            self._fail()
        elif self.state == STARTING:
            if (self.job_id, self.attempt) in w.fences:
                self.die("finds that its attempt is over")
                return
            self.become(BEGUN)
            self.seen, self.begun_at = True, w.now
            w.check_single_live_attempt(self)
            w.trace and w.trace_line(f"{self.name} begins")
        elif self.state == BEGUN:
            self._start_training()
        elif self.state == TRAINING:
            self._train()
        else:
            self.die("ends")

    def die(self, why: str) -> None:
        self.w.trace and self.w.trace_line(f"{self.name} {why}")
        self.become(GONE)

    def _fail(self) -> None:
        w = self.w
        kind = w.draw_index(5)
        if kind == 4:  # nothing but a kill ends it
            w.trace and w.trace_line(f"{self.name} hangs for good")
            self.stopped = self.deaf = True
        elif kind == 0 or self.state == STARTING:
            if self.state == TRAINING and w.rnd() < w.faults.lingers:
                self.orphans = 1 + w.draw_index(3)
            self.die("is killed, its ranks are not" if self.orphans else "is killed")
        elif kind == 1:
            w.trace and w.trace_line(f"{self.name} is stopped")
            self.stopped = True
        elif kind == 2 and self.state in (BEGUN, TRAINING):
            self.end((Cause.EXCEPTION, Cause.HANG, Cause.USER_ERROR, Cause.OOM)[w.draw_index(4)])
        elif kind == 3 and self.state == TRAINING:
            self._commit(tell=False)
            self.die("is killed behind a commit")

    def _start_training(self) -> None:
        w = self.w
        places = [place for place in w.disk.get(self.job_id, ()) if lineage_contains(self.segments, *place)]
        self.base = self.parent = max(places, default=(0, None))
        self.step = self.base[0]
        w.bases[self.job_id, self.attempt] = make_base(*self.base)
        self.lines += (("started",), ("training", *self.base, w.now))
        self.become(TRAINING)
        w.trace and w.trace_line(f"{self.name} trains from {self.base}")

    def _train(self) -> None:
        wish = Cause.SIGTERM if self.terminated else None
        if wish is None and self.control[0] is not Desired.RUN:
            wish = self.control[1]
        if wish is not None:
            if self.step > self.parent[0] and self.w.rnd() >= self.w.faults.agent:
                self._commit()
            self.end(wish)
            return
        self.step = min(STEPS, self.step + 1)  # what began from the last checkpoint has nothing left to do
        if self.step % EVERY == 0:
            self._commit()
            self.lines.append(("progress", self.step))
        if self.step >= STEPS:
            self.end(Cause.COMPLETED)

    def _commit(self, *, tell: bool = True) -> None:
        if self.step == self.parent[0] or (self.job_id, self.attempt) in self.w.fences:
            return
        finished = self.step >= STEPS
        place = (self.step, self.attempt)
        self.w.disk.setdefault(self.job_id, {})[place] = finished
        self.parent = place
        self.w.trace and self.w.trace_line(f"{self.name} commits step {self.step}")
        if tell:
            self.lines.append(("checkpoint", *place, finished))

    def end(self, cause: Cause) -> None:
        self.result = Result(cause, self.step, self.w.now.isoformat())
        self.become(RESULT)
        self.w.trace and self.w.trace_line(f"{self.name} has ended with {cause}")

    # --- reports -------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        w = self.w
        if (self.job_id, self.attempt) in w.fences and self.state in (BEGUN, TRAINING):  # as the uplink looks for it
            w.trace and w.trace_line(f"{self.name} finds that it is over")
            self.end(Cause.LEASE_LOST)
        phase = AttemptPhase.STOPPING if self.state == RESULT else AttemptPhase.RUNNING
        made = Report(
            self.job_id, self.attempt, phase, self.step, self.acked + 1, self.lines[self.acked :], self.result
        )
        if w.rnd() < w.faults.lost:
            fate = ("lost", "late", "unheard", "twice", "held")[w.draw_index(5)]
            w.trace and w.trace_line(f"{self.name}: a report is {fate}")
            if fate == "late":
                self.flying.append((made, False))
            elif fate == "held":
                if self._admitted(made, True, held=True):
                    self.flying.append((made, True))
            elif fate != "lost":
                self.deliver(made, heard=fate == "twice")
            if fate != "twice":
                return
        self.deliver(made)

    def deliver_pending(self) -> None:
        """Something that was on its way arrives, or goes on within the service."""
        made, admitted = self.flying.pop(self.w.draw_index(len(self.flying)))
        if admitted:
            self._store(made, heard=False)
        else:
            self.deliver(made, heard=False)

    def deliver(self, made: Report, *, heard: bool = True) -> None:
        if self._admitted(made, heard):
            self._store(made, heard=heard)

    def _admitted(self, made: Report, heard: bool, *, held: bool = False) -> bool:
        try:
            self.w.admit(made, held=held)
        except (Conflict, NotFound) as error:
            self._denied(error.code, heard)
            return False
        return True

    def _store(self, made: Report, *, heard: bool) -> None:
        try:
            acked, desired, cause = self.w.ingest(made)
        except (Conflict, NotFound) as error:
            self._denied(error.code, heard)
            return
        assert not self.refused, f"{self.name} was refused once, and is listened to again"
        if heard and self.state != GONE and not self.stopped:
            self.acked = max(self.acked, acked)
            self.control = (desired, cause)

    def _denied(self, code: str, heard: bool) -> None:
        assert code in ("stale-attempt", "attempt-not-found", "job-not-found"), code
        self.refused = self.refused or code == "stale-attempt"
        if heard and self.state in (BEGUN, TRAINING) and not self.stopped:
            self.w.trace and self.w.trace_line(f"{self.name} is refused ({code}): it ends")
            self.end(Cause.LEASE_LOST)


class Engine:
    """Idempotent by name, slow to kill, sometimes wrong about who is gone."""

    slots = True

    def __init__(self, world: Any) -> None:
        self.w = world
        self.agents: list[Agent] = []
        self._of: dict[tuple[str, int], list[Agent]] = {}

    def submit(self, job_id: str, attempt: int, segments: Any) -> None:
        mine = self._of.setdefault((job_id, attempt), [])
        if any(agent.seen or agent.state != GONE for agent in mine):
            return
        w = self.w
        assert not w.known(job_id) or w.attempt(job_id, attempt) is not None, (
            f"{job_id}-a{attempt:04d} runs, and no row knows it"
        )
        w.trace and w.trace_line(f"{job_id}-a{attempt:04d} is submitted")
        made = Agent(w, job_id, attempt, segments)
        mine.append(made)
        self.agents.append(made)

    def poll(self, ref: tuple[str, int]) -> AttemptState:
        alive = False
        for agent in self._of.get(ref, ()):
            if agent.seen:
                return agent.observed_state()
            alive = alive or agent.state != GONE
        return UNBEGUN if alive else NOTHING

    def begun(self, ref: tuple[str, int]) -> Agent:
        return next(agent for agent in self._of[ref] if agent.seen)

    def spool(self, ref: tuple[str, int]) -> list[Any]:
        for agent in self._of.get(ref, ()):
            if agent.seen:
                return agent.lines
        return []

    def stop(self, ref: tuple[str, int]) -> None:
        for agent in self._of.get(ref, ()):
            agent.terminated = True

    def kill(self, ref: tuple[str, int]) -> list[str]:
        w, left = self.w, []
        for agent in self._of.get(ref, ()):
            if agent.orphans:
                agent.orphans -= 1
                left.append(f"ranks of {agent.name}")
            if agent.state == GONE or agent.out_of_reach:
                continue
            if agent.lingers == 0 and w.rnd() < w.faults.lingers:
                if w.rnd() < 0.5:  # its node is gone for good, says the engine; it is not
                    w.trace and w.trace_line(f"{agent.name} is out of reach and given up")
                    agent.out_of_reach, agent.seen_state = True, None
                    continue
                agent.lingers = 1 + w.draw_index(3)
            if agent.lingers > 0:
                agent.lingers -= 1
                agent.stopped = True  # in a system call that does not end
                left.append(f"process of {agent.name}")
                continue
            agent.die("is killed by the launcher")
        return left

    def live(self) -> list[Agent]:
        """What the engine knows to run."""
        return [agent for agent in self.agents if agent.state != GONE and not agent.out_of_reach]

    def sweep(self, known: Callable[[Agent], bool]) -> list[str]:
        """End what runs and is not ``known``; the names."""
        swept = [agent for agent in self.live() if not known(agent)]
        for agent in swept:
            agent.die("is swept away")
        return [agent.name for agent in swept]
