"""Sends the spools of ranks and agent to the service and receives the desired state, in a thread of the agent. Messages are sent
until acknowledged; training does not depend on the service."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import AttemptPhase, Desired
from ratchet_contract.protocol.messages import AGENT_RANK, AgentReport, AttemptResult, Control, LaunchFile, RankBatch
from ratchet_contract.protocol.timing import max_control_delay
from ratchet_worker.agent.rendezvous import NodeRendezvous
from ratchet_worker.agent.service_client import Fenced, ServiceLink, TooLarge, Unreachable
from ratchet_worker.ipc.log_lines import log_message
from ratchet_worker.ipc.report_spool import LOW_PRIORITY_KINDS, SpoolReader

_MAX_LINES: Final = 500
_MAX_BYTES: Final = 256 * 1024
_MIN_BYTES: Final = 1024
_FIRST_DELAY: Final = 0.1
_LAST_DELAY: Final = 2.0
_RESPONSE_TIME_FACTOR: Final = 20.0
"""Figures alone (``LOW_PRIORITY_KINDS``) wait this many times the last response time, within limits: an overloaded service
receives fewer requests instead of falling behind."""
_MAX_SLOW_PERIODS: Final = 15
"""The most periods that figures wait after a slow response. If the service requests more, the limit is ``max_control_delay``,
since a stop request arrives with a response."""
WATCH_SECONDS: Final = 1.0
"""If figures wait longer than this, the service is asked to respond meanwhile as soon as a request to the job changes."""


class Status(NamedTuple):
    """The supervisor's part of each report."""

    phase: AttemptPhase
    last_step: int


class Listener(Protocol):
    """Receives news from the service and gives the status for each report, in the report sender's thread; methods must not block.
    ``on_fenced`` is called at most once."""

    def status(self) -> Status: ...

    def on_control(self, control: Control) -> None: ...

    def on_fenced(self, reason: str) -> None: ...


class ReportSender:
    """Sends reports from a thread of its own. Call ``start``, and ``finish`` at the end, from the same thread."""

    def __init__(
        self,
        launch: LaunchFile,
        spools: Mapping[int, Path],
        listener: Listener,
        *,
        period: float,
        rendezvous: NodeRendezvous | None = None,
    ) -> None:
        """``spools``: by rank number, the file whose messages are sent; ``period``: usual seconds between two reports;
        ``rendezvous``: receives news of the group."""
        self._launch = launch
        self._rendezvous = rendezvous
        self._readers = {rank: SpoolReader(path, rank) for rank, path in spools.items()}
        self._listener = listener
        self._period = period
        self._link = ServiceLink(launch)
        self._fence_file = AttemptPaths(Path(launch.attempt_dir)).fence_file
        self._max_bytes = _MAX_BYTES
        self._failures = 0
        self._stopping = False
        self._periods_left = 1  # periods that figures alone still wait
        self._first = -1  # index of the first rank in the last report
        self._wake = threading.Event()
        self._deadline: float | None = None
        self._result: AttemptResult | None = None
        self._thread = threading.Thread(target=self._run, name="uplink", daemon=True)

    def start(self) -> None:
        """Begin to report; further calls have no effect."""
        if self._thread.ident is None:
            self._thread.start()

    def finish(self, result: AttemptResult, timeout: float) -> bool:
        """Send what is left and ``result`` for at most ``timeout`` seconds, and end the thread; blocks. True if the service has
        acknowledged ``result``."""
        self._result = result
        self._deadline = time.monotonic() + timeout
        self._wake.set()
        self._thread.join(timeout + 1.0)
        return not self._thread.is_alive() and self._result is None

    def _run(self) -> None:
        """The thread's loop: send reports until the attempt is fenced or ``finish`` ends it."""
        while True:
            try:
                delay = self._send_report()
            except Fenced as fenced:
                self._listener.on_fenced(str(fenced))
                return
            except Exception as error:  # must not end reporting: the next round starts afresh
                log_message(f"uplink: {type(error).__name__}: {error}")
                delay = self._back_off()
            if self._deadline is not None and (self._result is None or not self._is_retry_worthwhile(delay)):
                return
            self._pause(delay)

    def _is_retry_worthwhile(self, delay: float) -> bool:
        """True if a retry in ``delay`` seconds is before the deadline and an address of the service is known."""
        return self._deadline is not None and time.monotonic() + delay < self._deadline and self._link.has_address()

    def _pause(self, delay: float) -> None:
        """Wait ``delay`` seconds; ``finish`` ends a wait that began before it."""
        if self._deadline is None:
            self._wake.wait(delay)
        else:
            time.sleep(delay)

    def _send_report(self) -> float:
        """Send or skip one report, and return the seconds until the next one. Raises ``Fenced`` if the attempt is fenced."""
        if self._fence_file.exists():
            raise Fenced(f"{self._fence_file} exists: the service has declared this attempt over")
        ending = self._result
        batches, more = self._batches()
        result = None if more else ending
        status = self._listener.status()
        if self._can_skip_report(status, batches, more):
            return self._period
        report = AgentReport(
            job_id=self._launch.job_id,
            attempt=self._launch.attempt,
            node=self._launch.node,
            phase=status.phase if result is None else AttemptPhase.ENDED,
            last_step=status.last_step,
            batches=batches,
            result=result,
            address=None if self._rendezvous is None else self._rendezvous.address,
        )
        remaining = None if self._deadline is None else max(0.1, self._deadline - time.monotonic())
        asked = time.monotonic()
        try:
            ack = self._link.post(report, timeout=remaining)
        except TooLarge:
            self._max_bytes = max(_MIN_BYTES, self._max_bytes // 2)
            return self._back_off()
        except Unreachable as error:
            if self._failures == 0:
                log_message(f"uplink: {error}; trying again until it answers")
            # At the end the service is tried once more in any case: there is no time to obey a long Retry-After.
            return max(
                self._back_off(),
                error.retry_after_seconds if remaining is None else min(error.retry_after_seconds, remaining / 2),
            )
        if self._failures:
            log_message("uplink: the service answers again")
        self._failures = 0
        self._periods_left = periods_to_wait(
            time.monotonic() - asked, self._period, self._launch.spec.policy.stop_grace, self._link.report_after
        )
        moved = self._acknowledge(ack.acked)
        self._stopping = ack.control.desired is not Desired.RUN
        # Before ``on_group``: a group that is complete but has failed must not start.
        self._listener.on_control(ack.control)
        if self._rendezvous is not None and ack.group is not None:
            self._rendezvous.on_group(ack.group)
        if result is not None:
            self._result = None
        delay = self._periods_left * self._period
        if delay > WATCH_SECONDS and status.phase is AttemptPhase.RUNNING and not self._stopping:
            self._link.watch(ack.control, delay)
        return 0.0 if moved and more else self._period

    def _can_skip_report(self, status: Status, batches: Sequence[RankBatch], more: bool) -> bool:
        """Return True if this period's report can be skipped, and count the period. Only a report of normal training that has
        nothing but figures, such as metrics, is skipped, as long as such reports must wait and no request has changed."""
        busy = (
            self._deadline is not None
            or self._failures
            or self._stopping
            or more
            or status.phase is not AttemptPhase.RUNNING
        )
        news = any(message.kind not in LOW_PRIORITY_KINDS for batch in batches for message in batch.messages)
        if busy or news or self._periods_left == 0 or self._link.has_news():
            return False
        self._periods_left -= 1
        return True

    def _batches(self) -> tuple[list[RankBatch], bool]:
        """Return the unacknowledged messages, up to the limits of one report, and whether more are waiting."""
        batches: list[RankBatch] = []
        lines, size, more = _MAX_LINES, self._max_bytes, False
        ranks = [rank for rank in self._readers if rank != AGENT_RANK]
        # the ranks take turns to be first, so that one with many messages does not starve the others
        self._first = (self._first + 1) % max(1, len(ranks))
        turns = ranks[self._first :] + ranks[: self._first]
        if AGENT_RANK in self._readers:
            # after rank 0: of a checkpoint that it does not know yet, the service cannot record the agent's messages
            turns.insert(turns.index(0) + 1 if 0 in turns else 0, AGENT_RANK)
        behind = False  # True if rank 0 has more than fits into this report
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
        """Mark messages as received, up to the number given for each rank; True if any message was newly acknowledged."""
        before = {rank: reader.acked for rank, reader in self._readers.items()}
        for rank, reader in self._readers.items():
            if rank in acked:
                reader.ack(acked[rank])
        return any(reader.acked > before[rank] for rank, reader in self._readers.items())

    def _back_off(self) -> float:
        """Count one more failure in a row, and return the seconds to wait before the next try."""
        nominal = min(_LAST_DELAY, _FIRST_DELAY * 2.0 ** min(self._failures, 10))
        self._failures += 1
        return nominal * random.uniform(0.5, 1.0)


def periods_to_wait(response_seconds: float, period: float, stop_grace: float, requested_seconds: float = 0.0) -> int:
    """Return how many periods, at least one, a report with nothing but figures waits after a response. ``response_seconds``:
    the time that the response took. ``requested_seconds``: the wait that the service requested. ``stop_grace`` (seconds):
    limits the wait."""
    slow = min(_MAX_SLOW_PERIODS, int(_RESPONSE_TIME_FACTOR * response_seconds / period))
    most = int(max_control_delay(stop_grace) / period)
    return max(1, min(most, max(slow, int(requested_seconds / period))))
