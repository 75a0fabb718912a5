"""What the supervisor knows of one started rank, and the times it gives to ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ratchet_contract.messages import RankEnd
from ratchet_contract.paths import AttemptPaths
from ratchet_worker import group_abort, procs
from ratchet_worker.files import say
from ratchet_worker.results import Ended, read_rank_result
from ratchet_worker.stacks import Target, capture
from ratchet_worker.starter import RankProcess

_ABORT_TICK: Final = 0.01  # seconds between two looks whether the ranks have halted


@dataclass(frozen=True)
class Timing:
    """Seconds. ``moment``: what ranks get to write down their own failure after another one's death; ``stacks``: the most that
    they get to write their stacks before they are killed; ``abort``: the most that they get to abort their communicators;
    ``linger``: to exit after their result; ``report``: between two reports; ``delivery``: for the last report; ``tick``: between
    two looks at the counters."""

    moment: float = 0.3
    stacks: float = 3.0
    linger: float = 10.0
    abort: float = 2.0
    report: float = 0.3
    delivery: float = 5.0
    tick: float = 0.05


class SupervisedRank:
    """One started rank and what is known of its end."""

    def __init__(self, process: RankProcess, paths: AttemptPaths) -> None:
        self.process = process
        self.result_path = paths.rank_result(process.rank)
        self.log = paths.log(process.rank)
        self.live = True
        self.died_at = 0.0  # Unix seconds
        self.exit_code: int | None = None
        self.killed = False  # by the agent
        self.result_seen: float | None = None  # monotonic

    @property
    def halted(self) -> bool:
        """By a signal, or a debugger."""
        return procs.state(self.process.pid) in ("T", "t")

    @property
    def target(self) -> Target:
        return Target(self.process, self.log)

    def end(self, last_step: int) -> Ended:
        found = read_rank_result(self.result_path)
        result, at = found if found is not None else (None, self.died_at)
        step = max(last_step, result.last_step if result is not None else 0)
        code = None if self.killed else self.exit_code
        end = RankEnd(rank=self.process.rank, exit_code=code, last_step=step, result=result)
        return Ended(end, min(at, self.died_at))


def write_stacks(
    ranks: Sequence[SupervisedRank], why: str, patience: float, kill: Callable[[Sequence[SupervisedRank]], None]
) -> str:
    """Before ``ranks`` are killed, each writes the stacks of its threads to its log; returns which ones wrote none, in words.
    Those that are halted come last, behind ``kill`` of the others, and end at once: they are not to train on."""
    for rank in ranks:
        rank.killed = True  # without a handler yet, the signal itself ends it
    halted = [rank for rank in ranks if rank.halted]
    others = [rank for rank in ranks if rank not in halted]
    silent = capture({rank.process.rank: rank.target for rank in others}, why, patience)
    if halted:
        kill(others)
    silent |= capture({rank.process.rank: rank.target for rank in halted}, why, patience, quiet=0.0)
    for number, state in silent.items():
        say(f"rank {number} wrote no stacks: {state}")
    return "".join(f"; rank {number} wrote none ({state})" for number, state in silent.items())


def abort_groups(ranks: Sequence[SupervisedRank], why: str, patience: float, wait: Callable[[float], None]) -> str:
    """Before ``ranks`` are killed, each aborts its communicators; returns in words which have, after ``patience`` seconds at
    most. A rank that a signal has halted is not asked, since it cannot answer. ``wait(seconds)`` waits and notes who has died."""
    asked = [rank for rank in ranks if not rank.halted and not procs.is_exiting(rank.process.pid)]
    for rank in asked:
        rank.killed = True
        text = f"{why}; rank {rank.process.rank} aborts its process groups before the agent kills it"
        group_abort.ask(rank.process.pid, rank.log, text)
    deadline = time.monotonic() + patience
    while (left := [r for r in asked if r.live and not r.halted]) and time.monotonic() < deadline:
        wait(_ABORT_TICK)
    words = [f"aborted by {_numbers(done)}"] if (done := [r for r in asked if r.live and r not in left]) else []
    words += [f"not aborted by {_numbers(left)} within {patience:g} s"] if left else []
    if words:
        say(f"process groups {', '.join(words)}")
    return f"process groups {', '.join(words)} before the agent ended them" if words else ""


def _numbers(ranks: Sequence[SupervisedRank]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(rank.process.rank) for rank in ranks)}"
