"""The faults. ``strike`` tells whom it met, or None where there was nobody; what has to end is left to ``Stage.later``."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.processes import procfs
from ratchet_contract.processes.procfs import is_alive
from ratchet_contract.protocol.messages import AgentFile
from tests.support import clock_jumps
from tests.support.chaos.control_plane_process import Role
from tests.support.chaos.resources import parked
from tests.support.chaos.schedule import Draw, short_seconds, stop_seconds
from tests.support.chaos.world import BASE_RATE, Part, World

T = TypeVar("T")
LONGEST_JUMP: Final = 72_000.0
"""Seconds, of a clock."""


class Alive(NamedTuple):
    """A job whose newest attempt has a live agent."""

    number: int
    job_id: str
    paths: AttemptPaths
    agent: int
    real: bool

    @property
    def ranks(self) -> list[int]:
        try:
            words = Path(f"/proc/{self.agent}/task/{self.agent}/children").read_text().split()
        except OSError:
            return []
        return [int(word) for word in words]

    def __str__(self) -> str:
        return f"job {self.number} attempt {int(self.paths.root.name)}"


class Stage(Protocol):
    """What a fault needs of the run."""

    world: World

    @property
    def longest_stop(self) -> float: ...

    def alive(self) -> list[Alive]:
        """By order of submission."""
        ...

    def schedule(self, seconds: float, what: str, deed: Callable[[], None]) -> None: ...

    def mark_down(self, part: Part, seconds: float) -> None:
        """It was killed, and is to be started again."""
        ...


class Fault(Protocol):
    @property
    def name(self) -> str: ...

    def strike(self, stage: Stage, draw: Draw, victim: str | None) -> tuple[str, str] | None:
        """Whom it met, and how; None: there is nobody. ``victim``: of a replay, instead of the draw's."""
        ...


def choose_victim(among: Sequence[T], pick: float, named: str | None) -> T | None:
    """The one that is ``named`` so in a replay's log, else the one at that place."""
    if named is not None:
        return next((one for one in among if f"{named} ".startswith(f"{one} ")), None)
    return among[int(pick * len(among))] if among else None


def send(pid: int, number: signal.Signals, stage: Stage, seconds: float, what: str) -> bool:
    """The signal, and SIGCONT ``seconds`` after a SIGSTOP, to that very process, whatever has its number by then."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        signal.pidfd_send_signal(handle, number)
    except OSError:
        os.close(handle)
        return False
    if number != signal.SIGSTOP:
        os.close(handle)
        return True

    def go_on() -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(handle, signal.SIGCONT)
        os.close(handle)

    stage.schedule(seconds, f"{what} goes on", go_on)
    return True


@dataclass(frozen=True)
class OfJob:
    """SIGKILL or SIGSTOP of an agent or of one of its ranks."""

    name: str
    number: signal.Signals
    rank: bool

    def strike(self, stage: Stage, draw: Draw, victim: str | None) -> tuple[str, str] | None:
        found = choose_victim([one for one in stage.alive() if not self.rank or one.ranks], draw.pick, victim)
        if found is None:
            return None
        ranks = found.ranks if self.rank else [found.agent]
        if not ranks:
            return None
        place = int(draw.pick_part * len(ranks))
        whom = f"{found} {f'rank {place}' if self.rank else 'agent'}"
        seconds = stop_seconds(draw.size, stage.longest_stop)
        if not send(ranks[place], self.number, stage, seconds, whom):
            return None
        return whom, f"for {seconds:.1f} s" if self.number is signal.SIGSTOP else ""


@dataclass(frozen=True)
class OfPart:
    """SIGKILL or SIGSTOP of a process of the control plane."""

    name: str
    number: signal.Signals
    role: Role

    def strike(self, stage: Stage, draw: Draw, victim: str | None) -> tuple[str, str] | None:
        parts = {part.name: part for part in stage.world.parts_of(self.role) if part.alive}
        name = choose_victim(list(parts), draw.pick, victim)
        if name is None:
            return None
        part = parts[name]
        assert part.process is not None
        if self.number is signal.SIGKILL:
            part.signal(signal.SIGKILL)
            part.wait()
            seconds = short_seconds(draw.size, 5.0)
            stage.mark_down(part, seconds)
            return name, f"started again after {seconds:.1f} s"
        seconds = stop_seconds(draw.size, stage.longest_stop)
        return (name, f"for {seconds:.1f} s") if send(part.process.pid, self.number, stage, seconds, name) else None


class Database:
    """PostgreSQL ends (SIGINT, SIGQUIT) and is started again. SQLite has no server: another process holds its write lock."""

    name = "database"

    def strike(self, stage: Stage, draw: Draw, victim: str | None) -> tuple[str, str] | None:
        seconds = short_seconds(draw.size, 6.0)
        server = stage.world.server
        if server is None:
            held = sqlite3.connect(stage.world.paths.database, isolation_level=None, timeout=5)
            try:
                held.execute("BEGIN IMMEDIATE")
            except sqlite3.Error:
                held.close()
                return None
            stage.schedule(seconds, "the database's lock is given free", held.close)
            return "the database's write lock", f"held for {seconds:.1f} s"
        if not server.running:
            return None
        how = signal.SIGINT if draw.pick < 0.5 else signal.SIGQUIT
        server.shut_down(how)
        stage.schedule(seconds, "the database is started", server.start)
        return "the database", f"{how.name}, away for {seconds:.1f} s"


class Outage:
    """Nobody reaches an API."""

    name = "outage"

    def strike(self, stage: Stage, draw: Draw, victim: str | None) -> tuple[str, str] | None:
        relay, seconds = stage.world.relay, short_seconds(draw.size, 10.0)
        if relay.down:
            return None
        relay.down = True
        stage.schedule(seconds, "the relay is open", lambda: setattr(relay, "down", False))
        return "the relay", f"closed for {seconds:.1f} s"


class Storm:
    """Most requests are lost, cut, delayed, or come twice."""

    name = "storm"

    def strike(self, stage: Stage, draw: Draw, victim: str | None) -> tuple[str, str] | None:
        relay, seconds = stage.world.relay, short_seconds(draw.size, 10.0)
        if relay.rate > BASE_RATE:
            return None
        relay.rate = 0.3 + 0.6 * draw.pick
        stage.schedule(seconds, "the storm is over", lambda: setattr(relay, "rate", BASE_RATE))
        return "the relay", f"{relay.rate:.0%} of all requests for {seconds:.1f} s"


class FullDisk:
    """The file system of the whole run directory has no byte left: checkpoints, spools, logs, and SQLite's database."""

    name = "full-disk"

    def strike(self, stage: Stage, draw: Draw, victim: str | None) -> tuple[str, str] | None:
        home, seconds = stage.world.paths.home, short_seconds(draw.size, 8.0)
        filler = home / "filler"
        if filler.exists():
            return None
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
        stage.schedule(seconds, "the disk has room", lambda: filler.unlink(missing_ok=True))
        return "the disk", f"full for {seconds:.1f} s"


@dataclass(frozen=True)
class ClockJump:
    """The wall clock of one process jumps, forwards or backwards, and comes back as suddenly."""

    name: str
    of_job: bool

    def strike(self, stage: Stage, draw: Draw, victim: str | None) -> tuple[str, str] | None:
        if self.of_job:
            found = choose_victim(stage.alive(), draw.pick, victim)
            file = None if found is None else found.paths.root / clock_jumps.FILE
            whom = str(found)
        else:
            parts = {part.name: part for part in stage.world.parts}
            name = choose_victim(list(parts), draw.pick, victim)
            file, whom = None if name is None else parts[name].jump, str(name)
        if file is None or file.exists():
            return None
        ahead = (1.0 if draw.pick_part < 0.5 else -1.0) * LONGEST_JUMP ** (0.2 + 0.8 * draw.size)
        seconds = short_seconds(draw.pick_part, 10.0)
        try:
            file.write_text(repr(ahead))
        except OSError:
            return None
        stage.schedule(seconds, f"{whom}'s clock is right", lambda: file.unlink(missing_ok=True))
        return whom, f"by {ahead:+.0f} s for {seconds:.1f} s"


PARKED: Final = ("kill-parked", "stop-parked", "hand-over")
"""Faults of parked agents: passed over where there is none."""


@dataclass(frozen=True)
class OfParked:
    """SIGKILL or SIGSTOP of a parked agent or of its fork server."""

    name: str
    number: signal.Signals

    def strike(self, stage: Stage, draw: Draw, victim: str | None) -> tuple[str, str] | None:
        parts = {part.name: pids for part in stage.world.parts if (pids := parked(part))}
        name = choose_victim(list(parts), draw.pick, victim)
        if name is None:
            return None
        agent = parts[name][0]
        server = draw.pick_part < 0.5
        pids = procfs.live_descendants(agent) if server else [agent]
        whom, seconds = (
            f"{name} {'fork server' if server else 'parked agent'}",
            stop_seconds(draw.size, stage.longest_stop),
        )
        if not pids or not send(pids[0], self.number, stage, seconds, whom):
            return None
        return whom, f"for {seconds:.1f} s" if self.number is signal.SIGSTOP else ""


class HandOver:
    """A rank is killed, and what its restart is given to is struck at that moment: the parked agent, its fork server or the
    service, up to 0.1 s after the hand-over has begun."""

    name = "hand-over"

    def strike(self, stage: Stage, draw: Draw, victim: str | None) -> tuple[str, str] | None:
        parts = [part for part in stage.world.parts if parked(part) and not part.hand_over.exists()]
        jobs = [one for one in stage.alive() if one.real and one.ranks]
        found = choose_victim(jobs, draw.pick, victim)
        if not parts or found is None:
            return None
        part, whom = parts[0], ("AGENT", "SERVER", "SERVICE")[int(draw.pick_part * 3)]
        delay = max(0.0, 0.12 * draw.size - 0.02)
        word = "KILL" if whom == "SERVICE" or int(draw.size * 1000) % 2 else "STOP"
        strike = f"kill -{word} ${whom}" + (f"; sleep 2; kill -CONT ${whom}" if word == "STOP" else "")
        if whom == "SERVICE":
            strike = f"touch {part.killed}; {strike}"
        # without a delay it has been struck before the hand-over begins
        begun = f"kill -{word} ${whom}; " if not delay and whom != "SERVICE" else ""
        part.hand_over.write_text(f"{begun}(sleep {delay:.3f}; {strike}) >/dev/null 2>&1 &")
        if not send(found.ranks[0], signal.SIGKILL, stage, 0.0, str(found)):
            part.hand_over.unlink(missing_ok=True)
            return None
        return f"{found} rank 0", f"then {whom.lower()} of {part.name}: SIG{word} after {delay:.3f} s"


def table(engine: str, *, disk: bool) -> dict[str, tuple[Fault, int]]:
    """All faults of a world, by name, with how often each is drawn."""
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    found: list[tuple[Fault, int]] = [
        (OfJob("kill-rank", kill, True), 5), (OfJob("stop-rank", stop, True), 4),
        (OfJob("kill-agent", kill, False), 4), (OfJob("stop-agent", stop, False), 4),
        (Outage(), 2), (Storm(), 4), (Database(), 2), (ClockJump("clock-service", False), 2), (ClockJump("clock-agent", True), 1),
    ]  # fmt: skip
    roles: tuple[Role, ...] = ("service",) if engine == "sqlite" else ("api", "reconciler")
    for role in roles:
        found += [(OfPart(f"kill-{role}", kill, role), 3), (OfPart(f"stop-{role}", stop, role), 3)]
    found += [(OfParked("kill-parked", kill), 3), (OfParked("stop-parked", stop), 3), (HandOver(), 4)]
    if disk:
        found.append((FullDisk(), 2))
    return {fault.name: (fault, weight) for fault, weight in found}


def alive_job(number: int, job_id: str, real: bool, paths: AttemptPaths | None) -> Alive | None:
    """That job, if the agent of its newest attempt is there."""
    if paths is None:
        return None
    try:
        agent = AgentFile.model_validate_json(paths.agent_file.read_bytes())
    except (OSError, ValueError):
        return None
    return Alive(number, job_id, paths, agent.pid, real) if is_alive(agent.pid, agent.start_time) else None
