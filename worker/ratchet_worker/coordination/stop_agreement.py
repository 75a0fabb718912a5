"""The freeze: all ranks agree to stop, or to save, at the same position. In a round, every rank publishes the position that it
has started last; all ranks run up to the largest one and act there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch.distributed.distributed_c10d import Store

from ratchet_contract.exit_codes import EXIT_PREEMPTED
from ratchet_contract.phases import CAUSE_PRECEDENCE, Cause
from ratchet_worker.coordination.store_exchange import poll_until_present

STRIDE: Final = 1024
STEP: Final = 0
FINISH: Final = STRIDE - 1
NOT_STARTED: Final = 0
_NO_LIMIT: Final = 2**62


def position(step: int, phase: int = STEP) -> int:
    """Return a number that orders units of work: steps (from 1), evaluations after a step (``phase`` 1, 2 ...) and the job's end
    (``FINISH``)."""
    return step * STRIDE + phase


@dataclass(frozen=True)
class StopRequests:
    """Requests that a rank has received: the cause of a requested stop, if any, and the number of "save now" requests."""

    stop: Cause | None = None
    requests: int = 0


@dataclass(frozen=True)
class Decision:
    """What all ranks do after the unit at position ``target``. ``stop``: the cause for which they stop; None: they save and
    continue."""

    round: int
    target: int
    stop: Cause | None


class Stopped(SystemExit):
    """Raised on all ranks to stop them at the same position, as an exit of the script; do not catch it."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.cause, self.message = cause, message


def decide(number: int, published: list[tuple[int, StopRequests]]) -> Decision:
    """Return the decision of round ``number`` from all ranks' published positions and requests. Every rank computes the same
    one."""
    stops = {wish.stop for _, wish in published if wish.stop is not None}
    cause = next((c for c in CAUSE_PRECEDENCE if c in stops), None)
    return Decision(number, max(position for position, _ in published), cause)


class Agreement:
    """One rank's part of the agreement, with a side thread. ``listen(seconds)``: waits, and returns all requests that this rank
    has received so far. ``on_idle``: called with a decision that was made before any rank started a unit. The side thread makes
    both calls."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        listen: Callable[[float], StopRequests],
        on_idle: Callable[[Decision], None] | None = None,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._listen, self._on_idle = listen, on_idle
        self._condition = threading.Condition()
        self._position = NOT_STARTED
        self._limit = _NO_LIMIT
        self._decision: Decision | None = None
        # Counts from 0; a rank opens the next round only after it has acted on this one.
        self._round = 0
        self._served_requests = 0
        self._closing = False
        self._error: BaseException | None = None
        self._own_stop: Cause | None = None
        self._stop_received_at: float | None = None
        self._thread: threading.Thread | None = None
        self.received_requests = StopRequests()

    def start(self) -> None:
        """Start the side thread, which receives requests and runs the rounds."""
        self._thread = threading.Thread(target=self._run, name="ratchet-agreement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the side thread; call it when all ranks have started their last unit. Blocks up to 5 seconds."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def request_stop(self, cause: Cause) -> None:
        """Request a stop that originates in this rank itself, with ``cause``. Returns at once. May be called from any thread."""
        self._own_stop = cause

    def wait_for_decision(self) -> None:
        """Block until a request is decided or the side thread has failed. For the main thread, between two units."""
        with self._condition:
            self._condition.wait_for(lambda: self._decision is not None or self._error is not None)

    def seconds_since_stop(self) -> float:
        """Seconds since this rank received the first stop request; 0.0 if it has received none."""
        return 0.0 if self._stop_received_at is None else time.monotonic() - self._stop_received_at

    # --- main thread ---------------------------------------------------------------------------------------------------

    def begin(self, unit: int) -> Decision | None:
        """Record that this rank starts ``unit``, and return None. If a decision has an earlier target, return that decision
        instead: ``unit`` must not be started. May block. Raises the side thread's error."""
        with self._condition:
            while unit > self._limit and self._decision is None and self._error is None:
                self._condition.wait()
            if self._error is not None:
                raise self._error
            if unit <= self._limit:
                self._position = unit
                return None
            return self._decision

    def pending(self) -> Decision | None:
        """Return the decision that this rank can act on now, or None. Call it between two units."""
        with self._condition:
            decision = self._decision
            return decision if decision is not None and decision.target <= self._position else None

    def stop_pending(self) -> bool:
        """True if this rank can act on a decision now and that decision is a stop."""
        decision = self.pending()
        return decision is not None and decision.stop is not None

    def resolve(self, decision: Decision) -> None:
        """Record that the action of ``decision`` is done: work continues and the next round may open."""
        with self._condition:
            assert decision is self._decision
            self._decision, self._limit, self._round = None, _NO_LIMIT, self._round + 1
            self._condition.notify_all()

    def is_stopped_early(self, seconds: float) -> bool:
        """True if a stop was decided before this rank started a unit. Blocks up to ``seconds``."""
        with self._condition:
            if self._position != NOT_STARTED:
                return False
            # No later round matters: a rank acts on a decision only after this rank has published in that round.
            self._condition.wait_for(
                lambda: self._limit == _NO_LIMIT or self._decision is not None or self._error is not None, seconds
            )
            return self._decision is not None and self._decision.stop is not None

    # --- side thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """The side thread's loop: receive requests and run rounds. An error ends the thread, and is kept for ``begin``."""
        try:
            while not self._is_closed():
                self.received_requests = self._merge_requests(self._listen(0.05))
                if self._is_undecided() and (self._has_request() or self._is_round_open()):
                    self._run_round()
        except BaseException as error:  # passed to the main thread, which may be waiting in begin()
            with self._condition:
                self._error = None if self._closing else error
                self._condition.notify_all()

    def _merge_requests(self, requests: StopRequests) -> StopRequests:
        """Return ``requests``, with the cause from ``request_stop`` if that was called. Records the time of the first stop."""
        if self._own_stop is not None:
            requests = StopRequests(self._own_stop, requests.requests)
        if requests.stop is not None and self._stop_received_at is None:
            self._stop_received_at = time.monotonic()
        return requests

    def _is_closed(self) -> bool:
        with self._condition:
            return self._closing

    def _is_undecided(self) -> bool:
        """True if the current round has no decision yet."""
        with self._condition:
            return self._decision is None

    def _has_request(self) -> bool:
        """True if this rank has received a stop, or "save now" requests that no round has served yet."""
        return self.received_requests.stop is not None or self.received_requests.requests > self._served_requests

    def _key(self, name: object) -> str:
        """The store's key for ``name`` (a rank or ``open``) in the current round."""
        return f"freeze/{self._round}/{name}"

    def _is_round_open(self) -> bool:
        """True if a rank has opened the current round."""
        return self._store.check([self._key("open")])

    def _run_round(self) -> None:
        """Run the current round: publish this rank's position and requests, wait for those of all ranks, and apply the
        decision."""
        self._store.set(self._key("open"), "1")
        with self._condition:
            # Under the lock that the start of a unit takes, so no rank can be beyond the target.
            at = self._limit = self._position
        mine = {"position": at, "stop": self.received_requests.stop, "requests": self.received_requests.requests}
        self._store.set(self._key(self._rank), json.dumps(mine))
        published = self._gather()
        if published is None:
            return
        decision = decide(self._round, published)
        self._served_requests = max(self._served_requests, *(wish.requests for _, wish in published))
        idle = decision.target == NOT_STARTED
        with self._condition:
            if idle and decision.stop is None:
                self._limit, self._round = _NO_LIMIT, self._round + 1
            else:
                self._limit, self._decision = decision.target, decision
            self._condition.notify_all()
        if idle and self._on_idle is not None:
            self._on_idle(decision)

    def _gather(self) -> list[tuple[int, StopRequests]] | None:
        """Wait for what every rank has published in this round and return it in rank order; None if closed meanwhile."""
        keys = [self._key(rank) for rank in range(self._world_size)]
        for _ in poll_until_present(self._store, keys):
            if self._is_closed():
                return None
        found = [json.loads(self._store.get(key)) for key in keys]
        return [(f["position"], StopRequests(Cause(f["stop"]) if f["stop"] else None, f["requests"])) for f in found]
