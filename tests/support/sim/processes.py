"""Processes of the control plane that run one at a time, as a seed says: stopped, ended or left to run at points that matter.

A point is before and after every commit, and before and after every call of the launcher. Each process is a thread, of which
one alone runs at any moment: who has the baton. So a run is a function of its seed, and a process may be left standing at a
point for as long as the schedule likes, as SIGSTOP would leave it, while others take its work over.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import event
from sqlalchemy.orm import Session

from ratchet_service.db.clock import Clock
from ratchet_service.db.engine import Database

START: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Died(BaseException):
    """The process ends here: nothing is cleaned up, nothing is caught."""


class SimClock(Clock):
    """Simulated time: it passes when the schedule says so."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        self.set_by = 0.0
        """Seconds by which somebody has set the machines' wall clocks."""

    def now(self) -> datetime:
        return START + timedelta(seconds=self.elapsed + self.set_by)

    def monotonic(self) -> float:
        return self.elapsed

    def boot_id(self) -> str:
        return "sim"

    def server_now(self, session: Session) -> datetime:
        """By which leases expire: nobody sets it here."""
        return START + timedelta(seconds=self.elapsed)


@dataclass(frozen=True)
class Faults:
    """Probabilities at each point of a process, and of each of an agent's doings."""

    die: float = 0.01
    stall: float = 0.02
    away: float = 0.01  # the engine does not answer
    lost: float = 0.15  # a report, or its answer
    agent: float = 0.03  # an agent dies, hangs or fails
    lingers: float = 0.1  # what is killed does not go at once, or is out of reach and goes on
    jumps: float = 0.03  # time passes, and a lease or a deadline with it
    sets: float = 0.03  # wall clocks are set, and no time passes


STORM = Faults(die=0.02, stall=0.05, away=0.02, lost=0.3, agent=0.08, lingers=0.3, jumps=0.08)
QUIET = Faults(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
SET_BY: Final = (-7200.0, -40.0, 40.0, 3600.0, 7200.0)
"""Seconds."""


class Process:
    """One reconciler's process. ``turn`` lets it run until its next stall, the end of a round, or its death."""

    def __init__(self, name: str, body: Callable[[], None], stage: Stage) -> None:
        self.name, self._body, self._stage = name, body, stage
        self.stalled: str | None = None  # the point at which it stands
        self.dead = False
        self.error: BaseException | None = None
        self._ends = False
        self._mine, self._theirs = _acquired_lock(), _acquired_lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._mine.acquire()
        try:
            while not self._ends:
                self._body()
                self._hand_back()
        except Died:
            pass
        except BaseException as error:
            self.error = error
        self.dead = True
        self._theirs.release()

    def _hand_back(self) -> None:
        self._theirs.release()
        self._mine.acquire()

    def turn(self) -> None:
        """Give it the baton and wait until it comes back. Raises what the process failed with."""
        self.stalled, self._stage.running = None, self
        self._mine.release()
        self._theirs.acquire()
        self._stage.running = None
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """SIGKILL, wherever it stands."""
        if self.dead:
            return
        self._ends = True
        self.turn()
        self._thread.join(30)

    def pause(self, where: str) -> None:
        """Until its next turn."""
        self.stalled = where
        self._hand_back()
        if self._ends:
            raise Died

    def point(self, where: str, *, stall: float = 1.0) -> None:
        """The schedule may end the process here, or leave it standing (``stall`` times as often as elsewhere)."""
        if self._ends:
            raise Died
        if self._stage.chance(self._stage.faults.die):
            self._stage.trace_line(f"{self.name} dies {where}")
            raise Died
        if self._stage.chance(stall * self._stage.faults.stall):
            self._stage.trace_line(f"{self.name} is stopped {where}")
            self.stalled = where
            self._hand_back()
            self._stage.trace_line(f"{self.name} goes on {where}")
            if self._ends:
                raise Died


def _acquired_lock() -> threading.Lock:
    """As a semaphore of one, that only the other side releases: ``threading.Semaphore`` is written in Python."""
    made = threading.Lock()
    made.acquire()
    return made


class Stage:
    """What all actors share: the seed's choices, the time, the trace, and who runs."""

    def __init__(self, seed: int, faults: Faults, clock: SimClock) -> None:
        self.random = random.Random(seed)
        self.clock = clock
        clock.elapsed = clock.set_by = 0.0
        self.faults = faults
        self.trace: list[str] = []
        self.running: Process | None = None

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self.random.random() < probability

    def trace_line(self, text: str) -> None:
        self.trace.append(f"{self.clock.elapsed:8.2f} {text}")

    def point(self, where: str, *, stall: float = 1.0) -> None:
        """Of the process that runs; agents and users have theirs elsewhere."""
        if self.running is not None:
            self.running.point(where, stall=stall)


class SimDatabase(Database):
    """A real database on the stage's clock, with a point before and after every commit.

    Nobody stands still within a transaction: on SQLite all others would wait for it, which is not what is looked at here.
    """

    stage: Stage

    def __init__(self, url: str) -> None:
        self.time = SimClock()
        super().__init__(url, self.time)
        if self.is_sqlite:
            event.listen(self.engine, "connect", _not_durable)
        self.engine.pool._pre_ping = (
            False  # one thread, and a server that is there: nothing to ask at every transaction
        )

    @contextmanager
    def write(self) -> Iterator[Session]:
        self.stage.point("before a transaction")
        with super().write() as session:
            yield session
            self.stage.point("before a commit", stall=0.0)
        self.stage.point("after a commit")


def _not_durable(connection: object, _record: object) -> None:
    """What a power cut would cost is not looked at here, and syncing is most of what a transaction costs."""
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("PRAGMA synchronous = OFF")
    cursor.close()
