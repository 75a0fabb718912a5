"""The supervisor's view of one started rank, and the time limits that it sets for ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import RankEnd
from ratchet_worker.agent.rank_starter import RankProcess
from ratchet_worker.ipc import group_abort
from ratchet_worker.ipc.log_lines import log_message
from ratchet_worker.ipc.result_files import Ended, read_rank_result
from ratchet_worker.ipc.stack_dump import Target, capture_stacks

_ABORT_TICK: Final = 0.01  # seconds between two polls of whether the ranks have halted


@dataclass(frozen=True)
class Timing:
    """Time limits and pauses of the supervision, in seconds."""

    failure_grace: float = 0.3  # for ranks to write their own failure after another rank's death
    stacks: float = 3.0  # for ranks to write their stacks before they are killed
    linger: float = 10.0  # for ranks to exit after their result is written
    abort: float = 2.0  # for ranks to abort their communicators
    report: float = 0.3  # pause between two reports
    delivery: float = 5.0  # for sending the last report
    tick: float = 0.05  # pause between two polls of the counters


class SupervisedRank:
    """One started rank, and what is known about its end."""

    def __init__(self, process: RankProcess, paths: AttemptPaths) -> None:
        self.process = process
        self.result_path = paths.rank_result(process.rank)
        self.log = paths.log(process.rank)
        self.live = True
        self.died_at = 0.0  # Unix seconds
        self.exit_code: int | None = None
        self.killed = False  # by the agent
        self.result_seen_at: float | None = None  # monotonic

    @property
    def is_halted(self) -> bool:
        """True if a signal or a debugger has halted the process."""
        found = procfs.stat(self.process.pid)
        return found is not None and found.state in "Tt"

    @property
    def target(self) -> Target:
        """The rank's process and log, for ``capture_stacks``."""
        return Target(self.process, self.log)

    def end(self, last_step: int) -> Ended:
        """Return how the dead rank ended; the exit code is None if it is marked as killed. ``last_step``: the last one that its
        counter showed."""
        found = read_rank_result(self.result_path)
        result, at = found if found is not None else (None, self.died_at)
        step = max(last_step, result.last_step if result is not None else 0)
        code = None if self.killed else self.exit_code
        end = RankEnd(rank=self.process.rank, exit_code=code, last_step=step, result=result)
        return Ended(end, min(at, self.died_at))


def write_stacks(
    ranks: Sequence[SupervisedRank], why: str, timeout: float, kill: Callable[[Sequence[SupervisedRank]], None]
) -> str:
    """Have each of ``ranks`` write the stacks of its threads to its log, under a heading with ``why``. All of them are marked
    as killed. Halted ranks write last, after ``kill`` was called for the others. Returns text to append to a message, which
    names the ranks that wrote no stacks; empty if all wrote them."""
    for rank in ranks:
        rank.killed = True  # the signal itself ends a rank that has no handler yet
    halted = [rank for rank in ranks if rank.is_halted]
    others = [rank for rank in ranks if rank not in halted]
    silent = capture_stacks({rank.process.rank: rank.target for rank in others}, why, timeout)
    if halted:
        kill(others)
    silent |= capture_stacks({rank.process.rank: rank.target for rank in halted}, why, timeout, quiet_seconds=0.0)
    for number, state in silent.items():
        log_message(f"rank {number} wrote no stacks: {state}")
    return "".join(f"; rank {number} wrote none ({state})" for number, state in silent.items())


def abort_groups(ranks: Sequence[SupervisedRank], why: str, timeout: float, wait: Callable[[float], None]) -> str:
    """Have each of ``ranks`` abort its communicators, and mark it as killed. Ranks that are halted or exiting are left out.
    Blocks for about ``timeout`` seconds at most, by calls of ``wait``. Returns a phrase on which ranks have aborted and which
    have not; it may be empty. ``why``: the reason, for the ranks' logs."""
    asked = [rank for rank in ranks if not rank.is_halted and not procfs.is_exiting(rank.process.pid)]
    for rank in asked:
        rank.killed = True
        text = f"{why}; rank {rank.process.rank} aborts its process groups before the agent kills it"
        group_abort.request_abort(rank.process.pid, rank.log, text)
    deadline = time.monotonic() + timeout
    while (left := [r for r in asked if r.live and not r.is_halted]) and time.monotonic() < deadline:
        wait(_ABORT_TICK)
    words = [f"aborted by {_format_ranks(done)}"] if (done := [r for r in asked if r.live and r not in left]) else []
    words += [f"not aborted by {_format_ranks(left)} within {timeout:g} s"] if left else []
    if words:
        log_message(f"process groups {', '.join(words)}")
    return f"process groups {', '.join(words)} before the agent ended them" if words else ""


def _format_ranks(ranks: Sequence[SupervisedRank]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(rank.process.rank) for rank in ranks)}"
