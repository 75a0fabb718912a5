"""Runs one node's ranks of an attempt, in the agent's main thread, since ranks die with the thread that forked them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import AttemptPhase, Cause, Desired
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import Control, LaunchFile
from ratchet_contract.protocol.timing import Pace
from ratchet_contract.script.public_names import PACKAGE
from ratchet_contract.script.unmanaged_script import SESSION_PACKAGE
from ratchet_worker.agent.desired_state import DesiredState
from ratchet_worker.agent.hang_detector import Learner, Watch
from ratchet_worker.agent.rank_handle import SupervisedRank, Timing, abort_groups, write_stacks
from ratchet_worker.agent.rank_starter import RankPlan, Starter
from ratchet_worker.agent.report_sender import Status
from ratchet_worker.agent.wakeup_pipe import WakeupPipe
from ratchet_worker.ipc import child_processes
from ratchet_worker.ipc.control_file import write_control
from ratchet_worker.ipc.log_lines import log_message
from ratchet_worker.ipc.log_lines import now as clock
from ratchet_worker.ipc.progress_counter import CounterReader
from ratchet_worker.ipc.result_files import (
    Conclusion,
    Ended,
    Evidence,
    NotStarted,
    default_cause,
    is_fine,
    is_killed,
    peer_failure,
)

T = TypeVar("T")
_SCRIPT_HINT: Final = (
    f": a script whose main file imports the Session of `{PACKAGE}`, or mentions {SESSION_PACKAGE}, is expected to begin the "
    "steps of a Session by then; any other is unmanaged and has no deadline"
)
_KILL_TIMEOUT: Final = 10.0  # seconds a killed rank may take to die (freeing memory, a stuck disk)
_PEER_TIMEOUT: Final = 5.0
"""Seconds, in a group of several nodes. When one rank stops, the ranks of all nodes soon make no progress. The agent that sees
its own rank halted reports it first; the others wait this long for that report before they blame their own ranks."""


class Supervisor:
    """Runs one node's ranks of an attempt: call ``run`` once after ``start``. It is the report sender's ``Listener``."""

    def __init__(self, launch: LaunchFile, paths: AttemptPaths, starter: Starter, timing: Timing) -> None:
        self._paths = paths
        self._control_file = paths.node(launch.node).control_file
        self._starter = starter
        self._timing = timing
        self._policy = launch.spec.policy
        self._desired = DesiredState(launch.desired)
        self._ranks: dict[int, SupervisedRank] = {}
        self._is_multi_node = launch.spec.world.nodes > 1
        self._logs_command = f"ratchet logs {launch.job_id} --attempt {launch.attempt}"
        self._signal: Cause | None = None
        self._fenced: str | None = None
        self._peer_end: str | None = None
        self._peer_cause: Cause | None = None
        self._learner = Learner(launch.deadlines, launch.pace)
        self._stuck_since: float | None = None
        self._evidence = Evidence()
        self._oom = child_processes.OomWatch()
        self._wanted: Control | None = None  # the merged desired state that the main thread acts on
        self._published: Control | None = None  # the one that the control file has
        self._stop_since: float | None = None
        self.stop_at: str | None = None  # the same as a wall-clock time
        self._kill_at: float | None = None  # monotonic; set by the first failure of a rank
        self._failure = ""
        self._housekeeping_at = 0.0
        self._watch = Watch(
            {rank: CounterReader(paths.counter(rank)).read for rank in launch.ranks},
            self._learner,
            now=time.monotonic(),
            hint=_SCRIPT_HINT if launch.spec.script is not None else "",
            other_readers={
                rank: CounterReader(paths.counter(rank)).read
                for rank in range(launch.world_size)
                if rank not in launch.ranks
            },
        )
        self._wakeup_pipe = WakeupPipe()
        kills = (fault for fault in launch.faults if fault.kind == "kill-agent" and fault.rank in launch.ranks)
        self._fault = next(kills, None)

    # --- the uplink's side (any thread) ---

    def status(self) -> Status:
        """Return the phase and the last finished step for the next report."""
        stopping = self._stop_since is not None or self._kill_at is not None
        running = AttemptPhase.RUNNING if self._watch.ready else AttemptPhase.LAUNCHING
        return Status(AttemptPhase.STOPPING if stopping else running, self.last_step)

    def on_control(self, control: Control) -> None:
        """Receive a response of the service: the desired state, and perhaps a message that another node has failed."""
        self._peer_cause = self._peer_cause or control.peer_cause
        self._peer_end = self._peer_end or control.peer_end
        self._desired.update_from_service(control.model_copy(update={"peer_end": None, "peer_cause": None}))
        self._wakeup_pipe.wake()

    def on_fenced(self, reason: str) -> None:
        """Record that the attempt is fenced, and wake the main thread, which kills the ranks. ``reason``: text for the result."""
        self._fenced = reason
        self._wakeup_pipe.wake()

    # --- the main thread ---

    @property
    def last_step(self) -> int:
        """The highest step, counted over all attempts, that a rank of this node finished in this attempt; 0 for none."""
        return max((self._watch.last_step(rank) for rank in self._ranks), default=0)

    @property
    def remaining_grace(self) -> float:
        """Seconds left of ``policy.stop_grace``; all of it if no stop was requested."""
        spent = 0.0 if self._stop_since is None else time.monotonic() - self._stop_since
        return max(0.0, self._policy.stop_grace - spent)

    @property
    def pace(self) -> Pace | None:
        """The pace of this node's ranks in this attempt; None if there is nothing to report."""
        return self._learner.pace(hung=bool(self._evidence.hung))

    @property
    def evidence(self) -> Evidence:
        """Return what ``conclude`` needs besides the ranks' ends, such as hangs, the reason for fencing and the desired state."""
        return replace(self._evidence, fenced=self._fenced, stop=self._wanted)

    def install_signal_handlers(self) -> None:
        """Install the agent's signal handlers. A stop signal only sets a flag that the main thread reads."""

        def flag(cause: Cause) -> None:
            self._signal = self._signal or cause

        self._wakeup_pipe.install_signal_handlers(flag)

    def raise_if_over(self) -> None:
        """Raise ``NotStarted`` if the attempt is fenced or is to stop, or another node has failed. Also writes a changed desired
        state to the control file."""
        self._publish()
        wanted = self._wanted
        if self._fenced is not None:
            raise NotStarted(Conclusion(Cause.LEASE_LOST, None, None, self._fenced))
        if wanted is not None and wanted.desired is not Desired.RUN:
            cause = wanted.cause or default_cause(wanted.desired)
            raise NotStarted(Conclusion(cause, None, None, f"{cause}: stopped before any rank was started"))
        if self._peer_end is not None:
            raise NotStarted(peer_failure(self._peer_end, time.time()))

    def wait_for(self, done: Callable[[], T | None], deadline: float) -> T | None:
        """Return the first value of ``done`` that is not None, or None at ``deadline`` (monotonic seconds). Blocks. Raises
        ``NotStarted`` as ``raise_if_over``."""
        while (value := done()) is None and time.monotonic() < deadline:
            self._wait(self._timing.tick)
            self.raise_if_over()
        self.raise_if_over()  # a stop may have arrived with the value
        return value

    def start(self, plans: Sequence[RankPlan]) -> None:
        """Start all ranks. Raises ``NotStarted`` as ``raise_if_over``, and ``OSError``, after which the caller must call
        ``finish``."""
        self.raise_if_over()
        self._watch.begin(time.monotonic())
        for process in self._starter.start(plans):
            self._ranks[process.rank] = SupervisedRank(process, self._paths)

    def run(self) -> list[Ended]:
        """Watch the ranks until all have ended, or kill them, for example after a failure; return their ends in the order of
        ranks. Blocks."""
        while any(r.live for r in self._ranks.values()):
            self._wait(self._timing.tick)
            self._step()
        return self.finish()

    def finish(self) -> list[Ended]:
        """Kill what is left of the ranks, wait for their death for at most ``_KILL_TIMEOUT`` seconds, and return all ends in the
        order of ranks. May be called repeatedly."""
        self._kill_live("the attempt ends")
        self._watch.poll(time.monotonic())
        for rank in self._ranks.values():
            rank.process.kill_group()  # its children may outlive it
            if rank.process.exit_code() is not None:
                rank.process.reap()
        return [rank.end(self._watch.last_step(number)) for number, rank in sorted(self._ranks.items())]

    def _step(self) -> None:
        """Make one pass of the main loop. Kills the ranks if, for example, the attempt is fenced or ranks hang."""
        self._collect()
        if self._fenced is not None:
            log_message(f"fenced: {self._fenced}")
            self._kill_live("the attempt is fenced")
            return
        now = time.monotonic()
        self._watch.poll(now)
        self._inject_fault()
        self._publish()
        self._housekeeping(now)
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill_live(self._failure)
        elif self._peer_end is not None and any(rank.live for rank in self._ranks.values()):
            log_message(f"another node has failed: {self._peer_end}")
            self._evidence = replace(self._evidence, peer_end=self._peer_end)
            if self._peer_cause is Cause.HANG:
                self._write_stacks("a rank of another node hangs")
            self._kill_live("another node has failed")
        elif not self._end_hang(now):
            self._end_overdue_stop(now)

    def _wait(self, seconds: float) -> None:
        """Wait until a rank dies, the main thread is woken, or ``seconds`` pass. Records nothing."""
        self._wakeup_pipe.wait([r.process.fileno() for r in self._ranks.values() if r.live], seconds)

    def _collect(self) -> None:
        """Record the exit code and time of each rank that has died since the last call. The first failure starts the wait after
        which all ranks are killed. After a rank was killed by a signal, there is no wait."""
        for number, rank in self._ranks.items():
            if not rank.live or (code := rank.process.exit_code()) is None:
                continue
            rank.live, rank.exit_code, rank.died_at = False, code, time.time()
            log_message(
                f"rank {number} (pid {rank.process.pid}) ended with {code}{' (killed by the agent)' * rank.killed}"
            )
            if code == -signal.SIGKILL and not rank.killed and self._oom.killed_recently():
                self._evidence = replace(self._evidence, oom=self._evidence.oom | {number})
            end = rank.end(0).end
            if end.result is None or not is_fine(end):
                # An end without a result was not agreed on, whatever its cause: the others would wait for this rank.
                # If it was killed, no failure that another rank may still write is the cause.
                kill_at = time.monotonic() + (0.0 if is_killed(end) else self._timing.failure_grace)
                if self._kill_at is None or kill_at < self._kill_at:
                    self._kill_at, self._failure = kill_at, f"rank {number} ended with {code}"

    def _wait_and_collect(self, seconds: float) -> None:
        """Wait until a rank dies, the main thread is woken, or ``seconds`` pass; then record the ranks that have died."""
        self._wait(seconds)
        self._collect()

    def _publish(self) -> None:
        """Write the merged desired state to the control file if it has changed; a failed write is retried at the next call. The
        first stop starts ``stop_grace``."""
        if self._signal is not None:
            self._desired.update_from_signal(self._signal)
        wanted = self._wanted = self._desired.merged()
        if wanted == self._published:
            return
        if self._stop_since is None and wanted.desired is not Desired.RUN:
            self._stop_since, self.stop_at = time.monotonic(), clock()
        try:
            write_control(self._control_file, wanted)
        except OSError as error:
            log_message(f"control.json cannot be written: {error}")
            return
        self._published = wanted
        log_message(f"desired state: {wanted.desired} ({wanted.cause}), checkpoint request {wanted.checkpoint_request}")

    def _housekeeping(self, now: float) -> None:
        """Once a second: reap orphans, poll for out-of-memory kills, and kill ranks that do not exit after their result."""
        if now - self._housekeeping_at < 1.0:
            return
        self._housekeeping_at = now
        child_processes.reap_orphans(lambda: {r.process.pid for r in self._ranks.values()})
        self._oom.killed_recently()
        for number, rank in self._ranks.items():
            if not rank.live or not rank.result_path.exists():
                continue
            if rank.result_seen_at is None:
                rank.result_seen_at = now
            elif now - rank.result_seen_at > self._timing.linger:
                log_message(f"rank {number} has written its result and does not exit; killing it")
                self._abort_and_kill([rank], "it has written its result and does not exit")

    def _end_hang(self, now: float) -> bool:
        """If ranks are stuck beyond their deadline, have the live ranks write their stacks, kill them, and return True.
        Otherwise return False. With several nodes, ranks that are not halted must be stuck for another ``_PEER_TIMEOUT``
        seconds before that."""
        waited_for = [n for n, r in self._ranks.items() if r.live and r.result_seen_at is None]
        stuck = self._watch.find_stuck(waited_for, self._is_stopped, now)
        if stuck is None:
            self._stuck_since = None
            return False
        message = stuck.message
        if self._is_multi_node and not stuck.halted:
            self._stuck_since = self._stuck_since or now
            if now - self._stuck_since < _PEER_TIMEOUT:
                return False
            message += "; they may have waited for ranks of another node, whose agent has reported nothing"
        log_message(f"hang: {message}")
        since = time.time() - (now - stuck.since)
        message += self._write_stacks("hang")
        self._evidence = replace(self._evidence, hung=stuck.ranks, hang_message=message, hung_since=since)
        self._kill_live("hang")
        return True

    def _inject_fault(self) -> None:
        """Carry out a trial's fault plan, if any: kill this agent after the planned step, and with it its ranks."""
        if self._fault is None:
            return
        reading = CounterReader(self._paths.counter(self._fault.rank)).read()
        if reading is not None and reading.started > self._fault.step:
            log_message(f"the trial's plan: this agent is killed after step {self._fault.step}")
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(128 + signal.SIGKILL)  # PID 1 of a container cannot kill itself by a signal

    def _is_stopped(self, rank: int) -> bool:
        """True if a signal or a debugger has halted the rank's process."""
        return self._ranks[rank].is_halted

    def _end_overdue_stop(self, now: float) -> None:
        """Kill the ranks, after they have written their stacks, if a requested stop takes longer than ``policy.stop_grace``
        allows."""
        if self._stop_since is None or now - self._stop_since <= self._policy.stop_grace:
            return
        moved = self._watch.has_progressed_since(self._stop_since)
        log_message(f"no agreed stop within {self._policy.stop_grace:g} s; killing the ranks")
        self._evidence = replace(self._evidence, overdue=True, progressed=moved)
        self._write_stacks("no agreed stop")
        self._kill_live("no agreed stop")

    def _write_stacks(self, why: str) -> str:
        """Have each live rank write its stacks to its log, and return text about this to append to a message. If some ranks
        are halted, the others are killed."""
        live = [rank for rank in self._ranks.values() if rank.live]
        told = write_stacks(live, why, self._timing.stacks, lambda ranks: self._abort_and_kill(ranks, why))
        return f"; the stacks of all threads are in the ranks' logs ({self._logs_command}){told}"

    def _kill_live(self, why: str) -> None:
        """Kill all live ranks and wait for their death, for at most ``_KILL_TIMEOUT`` seconds; then all count as dead."""
        self._evidence = replace(self._evidence, killed_at=self._evidence.killed_at or time.time())
        self._abort_and_kill([rank for rank in self._ranks.values() if rank.live], why)
        deadline = time.monotonic() + _KILL_TIMEOUT
        while any(r.live for r in self._ranks.values()) and time.monotonic() < deadline:
            self._wait_and_collect(deadline - time.monotonic())
        for number, rank in self._ranks.items():
            if rank.live:
                log_message(f"rank {number} (pid {rank.process.pid}) did not die of SIGKILL within {_KILL_TIMEOUT:g} s")
                rank.live, rank.died_at = False, time.time()

    def _abort_and_kill(self, ranks: Sequence[SupervisedRank], why: str) -> None:
        """Have ``ranks`` abort their communicators, then send SIGKILL to their process groups. Does not wait for their death."""
        if aborts := abort_groups(ranks, why, self._timing.abort, self._wait_and_collect):
            self._evidence = replace(self._evidence, aborts=f"{self._evidence.aborts}; {aborts}")
        for rank in ranks:
            if rank.live:
                rank.killed = rank.killed or not procfs.is_exiting(rank.process.pid)
                rank.process.kill_group()
