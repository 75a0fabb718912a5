"""Runs the ranks of one attempt from the first start to the last death. One thread: ranks die with the thread that forked
them, so everything here happens in the agent's main thread; only ``Wishes`` and ``on_*`` are touched by the uplink's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from ratchet_contract.deadlines import Pace
from ratchet_contract.messages import Control, LaunchFile
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import AttemptPhase, Cause, Desired
from ratchet_contract.public_names import PACKAGE
from ratchet_contract.scripts import SESSION_PACKAGE
from ratchet_worker import procs
from ratchet_worker.control import write_control
from ratchet_worker.counter import CounterReader
from ratchet_worker.files import now as clock
from ratchet_worker.files import say
from ratchet_worker.pace import Learner
from ratchet_worker.results import (
    Conclusion,
    Ended,
    Evidence,
    NotStarted,
    default_cause,
    is_fine,
    peer_ended,
)
from ratchet_worker.starter import RankPlan, Starter
from ratchet_worker.supervised import SupervisedRank, Timing, abort_groups, write_stacks
from ratchet_worker.uplink import Status
from ratchet_worker.waking import Waking
from ratchet_worker.watch import Watch
from ratchet_worker.wishes import Wishes

T = TypeVar("T")
_SCRIPT_HINT: Final = (
    f": a script whose main file imports the Session of `{PACKAGE}`, or mentions {SESSION_PACKAGE}, is expected to begin the "
    "steps of a Session by then; any other is unmanaged and has no deadline"
)
_DEATH_LIMIT: Final = 10.0  # seconds a killed rank may take to die (freeing memory, a stuck disk)
_PEER_PATIENCE: Final = 5.0
"""Seconds, in a group of several nodes. Where a rank has stopped, all nodes' ranks stand still from then on: the agent that sees
its own halted says so first, the others wait for that this long before they take their own ranks for the guilty ones."""


class Supervisor:
    """``run`` once. Also the uplink's ``Listener``."""

    def __init__(self, launch: LaunchFile, paths: AttemptPaths, starter: Starter, timing: Timing) -> None:
        self._paths = paths
        self._control_file = paths.node(launch.node).control_file
        self._starter = starter
        self._timing = timing
        self._policy = launch.spec.policy
        self._wishes = Wishes(launch.desired)
        self._ranks: dict[int, SupervisedRank] = {}
        self._several = launch.spec.world.nodes > 1
        self._read_at = f"ratchet logs {launch.job_id} --attempt {launch.epoch}"
        self._signal: Cause | None = None
        self._fenced: str | None = None
        self._peer_end: str | None = None
        self._peer_cause: Cause | None = None
        self._learner = Learner(launch.deadlines, launch.pace)
        self._still_since: float | None = None
        self._evidence = Evidence()
        self._oom = procs.OomWatch()
        self._published: Control | None = None
        self._stop_since: float | None = None
        self.stop_at: str | None = None  # the same by the clock
        self._failed_since: float | None = None
        self._failure = ""
        self._housekept = 0.0
        self._watch = Watch(
            {rank: CounterReader(paths.counter(rank)).read for rank in launch.ranks},
            self._learner,
            now=time.monotonic(),
            hint=_SCRIPT_HINT if launch.spec.script is not None else "",
            others={
                rank: CounterReader(paths.counter(rank)).read
                for rank in range(launch.world_size)
                if rank not in launch.ranks
            },
        )
        self._waking = Waking()
        kills = (fault for fault in launch.faults if fault.kind == "kill-agent" and fault.rank in launch.ranks)
        self._fault = next(kills, None)

    # --- the uplink's side (any thread) ---

    def status(self) -> Status:
        stopping = self._stop_since is not None or self._failed_since is not None
        running = AttemptPhase.RUNNING if self._watch.ready else AttemptPhase.LAUNCHING
        return Status(AttemptPhase.STOPPING if stopping else running, self.last_step)

    def on_control(self, control: Control) -> None:
        self._peer_cause = self._peer_cause or control.peer_cause
        self._peer_end = self._peer_end or control.peer_end
        self._wishes.from_service(control.model_copy(update={"peer_end": None, "peer_cause": None}))
        self._waking.wake()

    def on_fenced(self, reason: str) -> None:
        self._fenced = reason
        self._waking.wake()

    # --- the main thread ---

    @property
    def last_step(self) -> int:
        return max((self._watch.last_step(rank) for rank in self._ranks), default=0)

    @property
    def grace_left(self) -> float:
        """Seconds of ``policy.stop_grace`` that are left; all of them where no stop was wished."""
        spent = 0.0 if self._stop_since is None else time.monotonic() - self._stop_since
        return max(0.0, self._policy.stop_grace - spent)

    @property
    def pace(self) -> Pace | None:
        """What the ranks have shown of the job's pace."""
        return self._learner.pace(hung=bool(self._evidence.hung))

    @property
    def evidence(self) -> Evidence:
        return replace(self._evidence, fenced=self._fenced, stop=self._published)

    def take_signals(self) -> None:
        """The first one that asks for a stop sets a flag."""

        def flag(cause: Cause) -> None:
            self._signal = self._signal or cause

        self._waking.take_signals(flag)

    def insist(self) -> None:
        """Raises ``NotStarted`` when the attempt is over, though no rank has been started: a stop is wished, the attempt is
        fenced, another node has failed."""
        self._publish()
        wish = self._published
        if self._fenced is not None:
            raise NotStarted(Conclusion(Cause.LEASE_LOST, None, None, self._fenced))
        if wish is not None and wish.desired is not Desired.RUN:
            cause = wish.cause or default_cause(wish.desired)
            raise NotStarted(Conclusion(cause, None, None, f"{cause}: stopped before any rank was started"))
        if self._peer_end is not None:
            raise NotStarted(peer_ended(self._peer_end, time.time()))

    def wait_for(self, done: Callable[[], T | None], deadline: float) -> T | None:
        """The first value of ``done``; None when it has given none until ``deadline`` (monotonic). Before ranks are started;
        raises as ``insist`` does."""
        while (value := done()) is None and time.monotonic() < deadline:
            self._wait(self._timing.tick)
            self.insist()
        self.insist()  # what came with the value, too
        return value

    def start(self, plans: Sequence[RankPlan]) -> None:
        """Start all ranks. Raises ``OSError`` when one cannot be started; those already started are then the caller's to
        ``finish``."""
        self._watch.begin(time.monotonic())
        for process in self._starter.start(plans):
            self._ranks[process.rank] = SupervisedRank(process, self._paths)

    def run(self) -> list[Ended]:
        """Watch until every rank has ended, by itself or by the agent's hand."""
        while any(r.live for r in self._ranks.values()):
            self._wait(self._timing.tick)
            self._step()
        return self.finish()

    def finish(self) -> list[Ended]:
        """Kill what is left of the ranks' groups and collect them; safe to call at any time, and again."""
        self._kill_live("the attempt ends")
        self._watch.look(time.monotonic())
        for rank in self._ranks.values():
            rank.process.kill_group()  # its children may outlive it
            if rank.process.exit_code() is not None:
                rank.process.reap()
        return [rank.end(self._watch.last_step(number)) for number, rank in sorted(self._ranks.items())]

    def _step(self) -> None:
        self._collect()
        if self._fenced is not None:
            say(f"fenced: {self._fenced}")
            self._kill_live("the attempt is fenced")
            return
        now = time.monotonic()
        self._watch.look(now)
        self._strike()
        self._publish()
        self._housekeeping(now)
        if self._failed_since is not None:
            if now - self._failed_since >= self._timing.moment:
                self._kill_live(self._failure)
        elif self._peer_end is not None and any(rank.live for rank in self._ranks.values()):
            say(f"another node has failed: {self._peer_end}")
            self._evidence = replace(self._evidence, peer_end=self._peer_end)
            if self._peer_cause is Cause.HANG:
                self._write_stacks("a rank of another node hangs")
            self._kill_live("another node has failed")
        elif not self._end_hang(now):
            self._end_overdue_stop(now)

    def _wait(self, seconds: float) -> None:
        """Until a rank dies, somebody wakes us, or ``seconds`` pass."""
        self._waking.wait([r.process.fileno() for r in self._ranks.values() if r.live], seconds)

    def _collect(self) -> None:
        """Note who has died."""
        for number, rank in self._ranks.items():
            if not rank.live or (code := rank.process.exit_code()) is None:
                continue
            rank.live, rank.exit_code, rank.died_at = False, code, time.time()
            say(f"rank {number} (pid {rank.process.pid}) ended with {code}{' (killed by the agent)' * rank.killed}")
            if code == -signal.SIGKILL and not rank.killed and self._oom.recently():
                self._evidence = replace(self._evidence, oom=self._evidence.oom | {number})
            end = rank.end(0).end
            if self._failed_since is None and (end.result is None or not is_fine(end)):
                # Without a result it was not agreed on, whatever ended it: the others would wait for it.
                self._failed_since, self._failure = time.monotonic(), f"rank {number} ended with {code}"

    def _let_die(self, seconds: float) -> None:
        self._wait(seconds)
        self._collect()

    def _publish(self) -> None:
        """Hand the merged wish to the ranks; tried again at the next look when the disk refuses."""
        if self._signal is not None:
            self._wishes.from_signal(self._signal)
        wish = self._wishes.merged()
        if wish == self._published:
            return
        if self._stop_since is None and wish.desired is not Desired.RUN:
            self._stop_since, self.stop_at = time.monotonic(), clock()
        try:
            write_control(self._control_file, wish)
        except OSError as error:
            say(f"control.json cannot be written: {error}")
            return
        self._published = wish
        say(f"wanted: {wish.desired} ({wish.cause}), checkpoint request {wish.checkpoint_request}")

    def _housekeeping(self, now: float) -> None:
        """Once a second: orphans, memory, and ranks that have written their result but do not leave."""
        if now - self._housekept < 1.0:
            return
        self._housekept = now
        procs.reap_orphans(lambda: {r.process.pid for r in self._ranks.values()})
        self._oom.recently()
        for number, rank in self._ranks.items():
            if not rank.live or not rank.result_path.exists():
                continue
            if rank.result_seen is None:
                rank.result_seen = now
            elif now - rank.result_seen > self._timing.linger:
                say(f"rank {number} has written its result and does not exit; killing it")
                self._abort_and_kill([rank], "it has written its result and does not exit")

    def _end_hang(self, now: float) -> bool:
        waited_for = [n for n, r in self._ranks.items() if r.live and r.result_seen is None]
        stuck = self._watch.stuck(waited_for, self._is_stopped, now)
        if stuck is None:
            self._still_since = None
            return False
        message = stuck.message
        if self._several and not stuck.halted:
            self._still_since = self._still_since or now
            if now - self._still_since < _PEER_PATIENCE:
                return False
            message += "; they may have waited for ranks of another node, whose agent has said nothing"
        say(f"hang: {message}")
        since = time.time() - (now - stuck.since)
        message += self._write_stacks("hang")
        self._evidence = replace(self._evidence, hung=stuck.ranks, hang_message=message, hung_since=since)
        self._kill_live("hang")
        return True

    def _strike(self) -> None:
        """The fault that a trial plans for this agent: its ranks die with it."""
        if self._fault is None:
            return
        reading = CounterReader(self._paths.counter(self._fault.rank)).read()
        if reading is not None and reading.started > self._fault.step:
            say(f"the trial's plan: this agent is killed after step {self._fault.step}")
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(128 + signal.SIGKILL)  # the first process of a container gets no signal of its own

    def _is_stopped(self, rank: int) -> bool:
        return self._ranks[rank].halted

    def _end_overdue_stop(self, now: float) -> None:
        if self._stop_since is None or now - self._stop_since <= self._policy.stop_grace:
            return
        moved = self._watch.moved_since(self._stop_since)
        say(f"no agreed stop within {self._policy.stop_grace:g} s; killing the ranks")
        self._evidence = replace(self._evidence, overdue=True, moved=moved)
        self._write_stacks("no agreed stop")
        self._kill_live("no agreed stop")

    def _write_stacks(self, why: str) -> str:
        live = [rank for rank in self._ranks.values() if rank.live]
        told = write_stacks(live, why, self._timing.stacks, lambda ranks: self._abort_and_kill(ranks, why))
        return f"; the stacks of all threads are in the ranks' logs ({self._read_at}){told}"

    def _kill_live(self, why: str) -> None:
        """Kill all living ranks, and wait until they are dead."""
        self._evidence = replace(self._evidence, killed_at=self._evidence.killed_at or time.time())
        self._abort_and_kill([rank for rank in self._ranks.values() if rank.live], why)
        deadline = time.monotonic() + _DEATH_LIMIT
        while any(r.live for r in self._ranks.values()) and time.monotonic() < deadline:
            self._let_die(deadline - time.monotonic())
        for number, rank in self._ranks.items():
            if rank.live:
                say(f"rank {number} (pid {rank.process.pid}) did not die of SIGKILL within {_DEATH_LIMIT:g} s")
                rank.live, rank.died_at = False, time.time()

    def _abort_and_kill(self, ranks: Sequence[SupervisedRank], why: str) -> None:
        """SIGKILL the groups of ``ranks``, after they have aborted their communicators. One that is dying already died by
        itself."""
        if aborts := abort_groups(ranks, why, self._timing.abort, self._let_die):
            self._evidence = replace(self._evidence, aborts=f"{self._evidence.aborts}; {aborts}")
        for rank in ranks:
            if rank.live:
                rank.killed = rank.killed or not procs.is_exiting(rank.process.pid)
                rank.process.kill_group()
