"""Processes of the control plane that run one at a time, as a seed says: they are stopped, ended or left to run at points.

A point is before and after every transaction, and before and after every call of the launcher. Each process is a thread, and only
one of the threads runs at any moment. So a run is a function of its seed, and a process may stand at a point for as long as the
schedule says, as after a SIGSTOP, while others take its work over.
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
from ratchet_service.db.principal import Principal

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
BEFORE_TRANSACTION: Final = "before a transaction"


class Died(BaseException):
    """The process ends here: nothing is cleaned up, nothing is caught."""


class SimClock(Clock):
    """Simulated time: it passes when the schedule says so."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        self.set_by = 0.0
        """Seconds by which the machines' wall clocks were set."""

    def now(self) -> datetime:
        return START + timedelta(seconds=self.elapsed + self.set_by)

    def monotonic(self) -> float:
        return self.elapsed

    def boot_id(self) -> str:
        return "sim"

    def server_now(self, session: Session) -> datetime:
        """The clock by which leases expire; it is never set."""
        return START + timedelta(seconds=self.elapsed)


@dataclass(frozen=True)
class Faults:
    """Probabilities: at each point of a process, for each action of an agent, for each move."""

    die: float = 0.01
    stall: float = 0.03
    away: float = 0.01  # the engine does not answer
    lost: float = 0.15  # a report, or its answer
    agent: float = 0.03  # an agent dies, hangs or fails
    lingers: float = 0.1  # a killed process does not end at once, or is out of reach and continues
    jumps: float = 0.05  # time passes, and a lease or a deadline with it
    sets: float = 0.02  # wall clocks are set, and no time passes


STORM: Final = Faults(die=0.03, stall=0.1, away=0.03, lost=0.4, agent=0.1, lingers=0.5, jumps=0.1, sets=0.05)
QUIET: Final = Faults(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
SET_BY: Final = (-7200.0, -40.0, 40.0, 3600.0, 7200.0)
"""Seconds."""


class Process:
    """The process of a reconciler. ``turn`` lets it run to its next stop, the end of a round, or its death."""

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
        """Let it run, and wait until it stops. Raises the error with which the process failed."""
        self.stalled, self._stage.running = None, self
        self._mine.release()
        self._theirs.acquire()
        self._stage.running = None
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """SIGKILL, at the point where it stands."""
        if self.dead:
            return
        self._ends = True
        self.turn()
        self._thread.join(30)

    def pause(self, where: str) -> None:
        """Stand until the next turn. Raises ``Died``."""
        self.stalled = where
        self._hand_back()
        if self._ends:
            raise Died

    def point(self, where: str, *, stall: float = 1.0) -> None:
        """The schedule may end the process here, or leave it standing (``stall``: factor of the probability). Raises ``Died``."""
        if self._ends:
            raise Died
        if self._stage.chance(self._stage.faults.die):
            self._stage.trace_line(f"{self.name} dies {where}")
            raise Died
        if self._stage.chance(stall * self._stage.faults.stall):
            self._stage.trace_line(f"{self.name} is stopped {where}")
            self.pause(where)
            self._stage.trace_line(f"{self.name} continues {where}")


class HeldRequest(Process):
    """A request that stands once: before its first transaction, after what was read without a lock has admitted it."""

    _stood = False

    def point(self, where: str, *, stall: float = 1.0) -> None:
        if where == BEFORE_TRANSACTION and not self._stood:
            self._stood = True
            self.pause(where)


def _acquired_lock() -> threading.Lock:
    """A semaphore of one that only the other side releases: ``threading.Semaphore`` is written in Python."""
    made = threading.Lock()
    made.acquire()
    return made


class Stage:
    """What all actors share: the seed's choices, the time, the trace, and which process runs."""

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
        """A point of the process that runs; agents and users have none."""
        if self.running is not None:
            self.running.point(where, stall=stall)


class SimDatabase(Database):
    """A real database on the stage's clock, with a point before and after every transaction. ``transactions``: how many were
    committed.

    No process stands within a transaction: on SQLite all others would wait for it, which is not tested here.
    """

    stage: Stage

    def __init__(self, url: str) -> None:
        self.time = SimClock()
        self.transactions = 0
        super().__init__(url, self.time)
        if self.is_sqlite:
            event.listen(self.engine, "connect", _not_durable)
        self.engine.pool._pre_ping = False  # the server is there: no question before every transaction

    @contextmanager
    def write(self, caller: Principal | None = None) -> Iterator[Session]:
        self.stage.point(BEFORE_TRANSACTION)
        with super().write(caller) as session:
            yield session
            self.stage.point("before a commit", stall=0.0)
        self.transactions += 1
        self.stage.point("after a commit")


def _not_durable(connection: object, _record: object) -> None:
    """Do not sync: nothing here has to survive a power cut."""
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("PRAGMA synchronous = OFF")
    cursor.close()
