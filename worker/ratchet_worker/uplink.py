"""From the ranks' spools to the service, and the service's wishes back: a thread of the agent that nobody waits for.

Lines are sent until acknowledged, by number, so a lost answer costs a repetition and nothing else. The service may go, come
back elsewhere or never have been there: training does not notice. Only an answer that proves this attempt to be no longer
the job's own ("fenced") ends it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from ratchet_contract.hearing import hears_within
from ratchet_contract.messages import (
    AGENT_RANK,
    AgentReport,
    AttemptResult,
    Control,
    LaunchFile,
    RankBatch,
)
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import AttemptPhase, Desired
from ratchet_worker.files import say
from ratchet_worker.meeting import Meeting
from ratchet_worker.service_link import Fenced, ServiceLink, TooLarge, Unreachable
from ratchet_worker.spool import FIGURES, SpoolReader

_MAX_LINES: Final = 500
_MAX_BYTES: Final = 256 * 1024
_MIN_BYTES: Final = 1024
_FIRST_DELAY: Final = 0.1
_LAST_DELAY: Final = 2.0
_SHARE: Final = 20.0
"""Figures alone wait for so many times as long as the last answer took: an agent asks for a twentieth of a service's thread at
the most, and a service with more to do than it can is asked for less instead of falling behind."""
_MOST_TURNS: Final = 15
"""Periods that figures wait for a slow answer at the most; and, where the service asks for more, never longer than
``hears_within``: the wish to stop comes with an answer."""


class Status(NamedTuple):
    """What the supervisor says of itself in each report."""

    phase: AttemptPhase
    last_step: int


class Listener(Protocol):
    """Called from the uplink's thread; must not block."""

    def status(self) -> Status: ...

    def on_control(self, control: Control) -> None: ...

    def on_fenced(self, reason: str) -> None: ...


class Uplink:
    """``start``, and ``finish`` at the end, from one and the same thread."""

    def __init__(
        self,
        launch: LaunchFile,
        spools: Mapping[int, Path],
        listener: Listener,
        *,
        period: float,
        meeting: Meeting | None = None,
    ) -> None:
        """``meeting``: of a group of several nodes; it is told what the service says of them."""
        self._launch = launch
        self._meeting = meeting
        self._readers = {rank: SpoolReader(path, rank) for rank, path in spools.items()}
        self._listener = listener
        self._period = period
        self._link = ServiceLink(launch)
        self._fence = AttemptPaths(Path(launch.attempt_dir)).fence_file
        self._max_bytes = _MAX_BYTES
        self._failures = 0
        self._stopping = False
        self._turns = 1  # in which figures alone wait still
        self._first = -1  # of the ranks, in the last report
        self._wake = threading.Event()
        self._end: float | None = None
        self._result: AttemptResult | None = None
        self._thread = threading.Thread(target=self._run, name="uplink", daemon=True)

    def start(self) -> None:
        """Begin to report; a second call changes nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def finish(self, result: AttemptResult, deadline: float) -> bool:
        """Send what is left and ``result``, for at most ``deadline`` seconds; True when the service has it all."""
        self._result = result
        self._end = time.monotonic() + deadline
        self._wake.set()
        self._thread.join(deadline + 1.0)
        return not self._thread.is_alive() and self._result is None

    def _run(self) -> None:
        while True:
            try:
                delay = self._once()
            except Fenced as fenced:
                self._listener.on_fenced(str(fenced))
                return
            except Exception as error:  # never the end of reporting: the next round starts afresh
                say(f"uplink: {type(error).__name__}: {error}")
                delay = self._back_off()
            if self._end is not None and (self._result is None or not self._worth(delay)):
                return
            self._pause(delay)

    def _worth(self, delay: float) -> bool:
        """At the end: try again after ``delay``? The service finds everything on the disk, too."""
        return self._end is not None and time.monotonic() + delay < self._end and self._link.known()

    def _pause(self, delay: float) -> None:
        if self._end is None:
            self._wake.wait(delay)
        else:
            time.sleep(delay)

    def _once(self) -> float:
        """Send one report; seconds until the next one. Raises ``Fenced``; also where the service is out of reach and the run
        directory is not."""
        if self._fence.exists():
            raise Fenced(f"{self._fence} is there: the service has declared this attempt over")
        ending = self._result
        batches, more = self._batches()
        result = None if more else ending
        status = self._listener.status()
        if self._may_wait(status, batches, more):
            return self._period
        report = AgentReport(
            job_id=self._launch.job_id,
            epoch=self._launch.epoch,
            node=self._launch.node,
            phase=status.phase if result is None else AttemptPhase.ENDED,
            last_step=status.last_step,
            batches=batches,
            result=result,
            address=None if self._meeting is None else self._meeting.address,
        )
        remaining = None if self._end is None else max(0.1, self._end - time.monotonic())
        asked = time.monotonic()
        try:
            ack = self._link.post(report, timeout=remaining)
        except TooLarge:
            self._max_bytes = max(_MIN_BYTES, self._max_bytes // 2)
            return self._back_off()
        except Unreachable as error:
            if self._failures == 0:
                say(f"uplink: {error}; trying again until it answers")
            # At the end it is asked once more in any case: whoever is told to come back in a minute has no minute.
            return max(self._back_off(), error.wait if remaining is None else min(error.wait, remaining / 2))
        if self._failures:
            say("uplink: the service answers again")
        self._failures = 0
        self._turns = waiting_turns(
            time.monotonic() - asked, self._period, self._launch.spec.policy.stop_grace, self._link.report_after
        )
        moved = self._acknowledge(ack.acked)
        self._stopping = ack.control.desired is not Desired.RUN
        self._listener.on_control(ack.control)  # first: a group that is complete, but has failed, starts nothing
        if self._meeting is not None and ack.group is not None:
            self._meeting.heard(ack.group)
        if result is not None:
            self._result = None
        return 0.0 if moved and more else self._period

    def _may_wait(self, status: Status, batches: Sequence[RankBatch], more: bool) -> bool:
        """Nothing but figures of a group that trains is reported in every second period only, and less often where answers are
        slow or say so (``waiting_turns``): more jobs can be looked after. A wish of the service's still reaches the ranks within
        a second, or ten with a service that looks after hundreds of jobs."""
        busy = (
            self._end is not None
            or self._failures
            or self._stopping
            or more
            or status.phase is not AttemptPhase.RUNNING
        )
        news = any(message.kind not in FIGURES for batch in batches for message in batch.messages)
        if busy or news or self._turns == 0:
            return False
        self._turns -= 1
        return True

    def _batches(self) -> tuple[list[RankBatch], bool]:
        """What is not acknowledged, up to the limits of one report; whether more is waiting. The ranks take turns to be first, so
        that one that says much does not keep the others from being heard. What the agent says of rank 0's checkpoints comes
        behind all that rank 0 has said: of one that the service has not heard of, it could not take it down."""
        batches: list[RankBatch] = []
        lines, size, more = _MAX_LINES, self._max_bytes, False
        ranks = [rank for rank in self._readers if rank != AGENT_RANK]
        self._first = (self._first + 1) % max(1, len(ranks))
        turns = ranks[self._first :] + ranks[: self._first]
        if AGENT_RANK in self._readers:
            turns.insert(turns.index(0) + 1 if 0 in turns else 0, AGENT_RANK)
        behind = False  # is there more of rank 0 than this report takes?
        for rank in turns:
            reader = self._readers[rank]
            if lines <= 0 or size <= 0 or (rank == AGENT_RANK and behind):
                waits = reader.has_more(0)
            else:
                batch, used = reader.batch(lines, size)
                if batch is not None:
                    batches.append(batch)
                    lines -= len(batch.messages)
                    size -= used
                waits = batch is not None and reader.has_more(used)
            more = more or waits
            behind = waits if rank == 0 else behind
        return batches, more

    def _acknowledge(self, acked: Mapping[int, int]) -> bool:
        before = {rank: reader.acked for rank, reader in self._readers.items()}
        for rank, reader in self._readers.items():
            if rank in acked:
                reader.ack(acked[rank])
        return any(reader.acked > before[rank] for rank, reader in self._readers.items())

    def _back_off(self) -> float:
        nominal = min(_LAST_DELAY, _FIRST_DELAY * 2.0 ** min(self._failures, 10))
        self._failures += 1
        return nominal * random.uniform(0.5, 1.0)


def waiting_turns(answer: float, period: float, stop_grace: float, asked: float = 0.0) -> int:
    """Periods (``period`` seconds each) that figures alone wait after an answer that took ``answer`` seconds and asked for
    ``asked`` seconds: at least one."""
    slow = min(_MOST_TURNS, int(_SHARE * answer / period))
    most = int(hears_within(stop_grace) / period)
    return max(1, min(most, max(slow, int(asked / period))))
