"""All ranks act at one and the same step: the freeze.

A side thread hears of wishes (``control.json``, signals) and opens a round in the rendezvous store. In a round every rank's
side thread publishes, under the lock that the start of each unit of work takes, the position it has last started; from that
instant the rank starts nothing new. The target is the largest position published: every rank runs up to it, and there all act
together: checkpoint and stop, or checkpoint and go on. No rank can be beyond the target, none needs a collective to agree, so it
is exact also under hooks that let ranks drift apart.

A **position** numbers the units of work, in the one order that all ranks follow: ``step * STRIDE + phase``. A unit is whatever
needs all ranks: a training step with the save that is due at its end, the exchange that begins an evaluation, the end of the job.

Store keys: ``freeze/<round>/open`` and ``freeze/<round>/<rank>``. Rounds count from 0; a rank opens round k + 1 only when it has
acted on round k. Each thread has a store client of its own.
"""

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
from ratchet_worker.exchange import until_present

STRIDE: Final = 1024
STEP: Final = 0
EVALUATION: Final = 1  # the first evaluation after a step begins; a second one has phase 2, and so on
FINISH: Final = STRIDE - 1
NOT_STARTED: Final = 0
_FREE: Final = 2**62


def position(step: int, phase: int = STEP) -> int:
    """Position of a unit of work; ``step`` counts from 1 (0: before the first)."""
    return step * STRIDE + phase


@dataclass(frozen=True)
class Wish:
    """What a rank has heard so far: a stop with its cause, and how many "save now" have been asked for."""

    stop: Cause | None = None
    requests: int = 0


@dataclass(frozen=True)
class Decision:
    """What all ranks do when each has finished everything up to ``target``. ``stop`` None: checkpoint and go on."""

    round: int
    target: int
    stop: Cause | None


class Stopped(SystemExit):
    """All ranks stop after the same step; let it pass. ``cause`` says who asked."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.cause, self.message = cause, message


def decide(number: int, published: list[tuple[int, Wish]]) -> Decision:
    """The decision of a round, from what the ranks published: the same on every rank, whoever computes it."""
    stops = {wish.stop for _, wish in published if wish.stop is not None}
    cause = next((c for c in CAUSE_PRECEDENCE if c in stops), None)
    return Decision(number, max(position for position, _ in published), cause)


class Agreement:
    """One rank's part. The main thread calls ``begin``, ``pending`` and ``resolve``; a side thread runs ``serve``.

    ``listen(seconds)`` waits up to that long for news and returns the newest ``Wish``; ``on_idle`` is called (from the side
    thread) with what is decided before any unit has been started: a start-up that takes long, or a script without a Session,
    can be left at once. A save that is asked for then has nothing to save and needs no ``resolve``.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        listen: Callable[[float], Wish],
        on_idle: Callable[[Decision], None] | None = None,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._listen, self._on_idle = listen, on_idle
        self._changed = threading.Condition()
        self._position = NOT_STARTED
        self._limit = _FREE
        self._decision: Decision | None = None
        self._round = 0
        self._served_requests = 0
        self._closing = False
        self._error: BaseException | None = None
        self._own: Cause | None = None
        self._stop_heard: float | None = None
        self._thread: threading.Thread | None = None
        self.wish = Wish()

    def start(self) -> None:
        """Start the side thread."""
        self._thread = threading.Thread(target=self._run, name="ratchet-agreement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the side thread; call when every unit of every rank has been started."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def ask(self, cause: Cause) -> None:
        """Wish a stop of all ranks' own accord. Any thread."""
        self._own = cause

    def wait_decided(self) -> None:
        """Until what was asked for is decided. The main thread, between two units."""
        with self._changed:
            self._changed.wait_for(lambda: self._decision is not None or self._error is not None)

    def since_stop(self) -> float:
        """Seconds since this rank first heard of a stop; 0.0 when it has not."""
        return 0.0 if self._stop_heard is None else time.monotonic() - self._stop_heard

    # --- main thread ---------------------------------------------------------------------------------------------------

    def begin(self, unit: int) -> Decision | None:
        """Start ``unit``, unless a decision with an earlier target stands: then that is returned and nothing was started.

        Waits while a round is open whose target is not known yet. Raises what ended the side thread, if anything did.
        """
        with self._changed:
            while unit > self._limit and self._decision is None and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if unit <= self._limit:
                self._position = unit
                return None
            return self._decision

    def pending(self) -> Decision | None:
        """The decision that this rank can act on now, having nothing left to run before it; else None. Never waits."""
        with self._changed:
            decision = self._decision
            return decision if decision is not None and decision.target <= self._position else None

    def stop_pending(self) -> bool:
        """Is what this rank can act on now a stop?"""
        decision = self.pending()
        return decision is not None and decision.stop is not None

    def resolve(self, decision: Decision) -> None:
        """The action of ``decision`` is done; work goes on and the next round may open."""
        with self._changed:
            assert decision is self._decision
            self._decision, self._limit, self._round = None, _FREE, self._round + 1
            self._changed.notify_all()

    def stopped_early(self, seconds: float) -> bool:
        """Was a stop decided before any unit was started? Waits up to ``seconds`` for a round that is open here: what another
        rank does because of a decision, its leaving among it, this rank meets only after its own part in that round."""
        with self._changed:
            if self._position != NOT_STARTED:
                return False
            self._changed.wait_for(
                lambda: self._limit == _FREE or self._decision is not None or self._error is not None, seconds
            )
            return self._decision is not None and self._decision.stop is not None

    # --- side thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed():
                self.wish = self._heard(self._listen(0.05))
                if self._idle() and (self._wanted() or self._opened()):
                    self._hold_round()
        except BaseException as error:  # must reach the main thread, which may be waiting in begin()
            with self._changed:
                self._error = None if self._closing else error
                self._changed.notify_all()

    def _heard(self, wish: Wish) -> Wish:
        if self._own is not None:
            wish = Wish(self._own, wish.requests)
        if wish.stop is not None and self._stop_heard is None:
            self._stop_heard = time.monotonic()
        return wish

    def _closed(self) -> bool:
        with self._changed:
            return self._closing

    def _idle(self) -> bool:
        with self._changed:
            return self._decision is None

    def _wanted(self) -> bool:
        return self.wish.stop is not None or self.wish.requests > self._served_requests

    def _key(self, name: object) -> str:
        return f"freeze/{self._round}/{name}"

    def _opened(self) -> bool:
        return self._store.check([self._key("open")])

    def _hold_round(self) -> None:
        """Open or join the current round: freeze, publish, gather, set the target."""
        self._store.set(self._key("open"), "1")
        with self._changed:
            at = self._limit = self._position
        mine = {"position": at, "stop": self.wish.stop, "requests": self.wish.requests}
        self._store.set(self._key(self._rank), json.dumps(mine))
        published = self._gather()
        if published is None:
            return
        decision = decide(self._round, published)
        self._served_requests = max(self._served_requests, *(wish.requests for _, wish in published))
        idle = decision.target == NOT_STARTED
        with self._changed:
            if idle and decision.stop is None:
                self._limit, self._round = _FREE, self._round + 1
            else:
                self._limit, self._decision = decision.target, decision
            self._changed.notify_all()
        if idle and self._on_idle is not None:
            self._on_idle(decision)

    def _gather(self) -> list[tuple[int, Wish]] | None:
        """What every rank published in this round, or None when this rank is closing meanwhile."""
        keys = [self._key(rank) for rank in range(self._world_size)]
        for _ in until_present(self._store, keys):
            if self._closed():
                return None
        found = [json.loads(self._store.get(key)) for key in keys]
        return [(f["position"], Wish(Cause(f["stop"]) if f["stop"] else None, f["requests"])) for f in found]
