"""The stage: a control plane in processes of its own, on either database, behind a rude relay, with a disk that can be filled.

On SQLite one process has the API and the reconciler, as SQLite wants it; on PostgreSQL there are two APIs and two reconcilers,
and the server is the run's own, so that it can be ended. Agents and clients reach the APIs through the relay alone.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract.api.roles import LOCAL_OWNER, Role
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.phases import JobPhase
from ratchet_contract.processes import parent_death
from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.migrate import upgrade
from ratchet_service.db.models import Job
from tests.support.chaos import control_plane_process
from tests.support.faulty_proxy import FaultyProxy
from tests.support.fork_server import RANKS, ROOT, TRAINERS, Program
from tests.support.postgres import PostgresServer, dedicated_postgres_server
from tests.support.server import processes_below, wait_for
from tests.support.tokens import make_token

Engine = Literal["sqlite", "postgresql"]
SLOTS: Final = 5
"""Fewer than the jobs at one time would take: they wait, and are stopped for those of higher priority."""
BASE_RATE: Final = 0.03
"""Of requests, struck by the relay at any time; a storm strikes many more."""
LATEST: Final = 6.0
"""Seconds by which a request comes late, at most."""
_START_DEADLINE: Final = 90.0


class Part:
    """One process of the control plane, and whoever starts it again after a crash, as a machine's init would."""

    def __init__(self, world: World, role: control_plane_process.Role, name: str) -> None:
        self._world, self.role, self.name = world, role, name
        self.told = world.stage / f"{name}.json"
        self.jump = world.stage / f"{name}.clock"
        self.hand_over = world.stage / f"{name}.hand-over"
        self.killed = world.stage / f"{name}.killed"
        self.process: Program | subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        world, self.starts = self._world, self.starts + 1
        options = control_plane_process.Options(
            self.role,
            str(world.paths.home),
            world.url,
            SLOTS,
            world.relay.url,
            str(self.told),
            str(self.jump),
            self.parks,
            str(self.hand_over),
            parent_death.process_name(os.getpid()),
            world.planted,
        )
        env = {**os.environ, "PYTHONPATH": ROOT, TRAINERS.variable: TRAINERS.address, RANKS.variable: RANKS.address}
        with (world.stage / f"{self.name}.log").open("ab") as log:
            self.process = TRAINERS.start(options.command(), log.fileno(), env=env, cwd=Path(ROOT))

    @property
    def parks(self) -> bool:
        """It keeps parked agents: one of two reconcilers, and a process that has all of it at every other start."""
        return (self.role == "service" and self.starts % 2 == 1) or self.name == "reconciler-0"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(20)

    @property
    def url(self) -> str | None:
        """Where its API listens, if it has come so far."""
        with suppress(OSError, ValueError):
            told = json.loads(self.told.read_text())
            if self.process is not None and told["pid"] == self.process.pid:
                return f"http://127.0.0.1:{told['port']}"
        return None

    def ready(self) -> bool:
        if self.role == "reconciler":
            return self.alive
        with suppress(httpx.HTTPError):
            return (
                self.url is not None
                and httpx.get(f"{self.url}/readyz", timeout=2, verify=False, trust_env=False).is_success
            )
        return False

    def log(self) -> str:
        return (self._world.stage / f"{self.name}.log").read_text(errors="replace")


class World:
    """A context manager; afterwards nothing of it is alive. ``root``: an empty directory; its ``home`` may be a small disk of its
    own (``disk``), which only then is filled."""

    def __init__(
        self, root: Path, engine: Engine, seed: int, *, planted: str | None = None, disk: bool = False
    ) -> None:
        self.engine, self.planted, self.disk = engine, planted, disk
        self.paths = HomePaths(root / "home")
        self.stage, self.notes = root / "stage", root / "notes"
        for folder in (self.paths.home, self.paths.jobs, self.stage, self.notes):
            folder.mkdir(parents=True, exist_ok=True)
        self.stack = ExitStack()
        self.server: PostgresServer | None = None
        try:
            if engine == "postgresql":
                self.server = self.stack.enter_context(dedicated_postgres_server())
            self.url = self.server.url if self.server is not None else sqlite_url(self.paths.database)
            self.database = Database(self.url)
            self.stack.callback(self.database.dispose)
            upgrade(self.database)
            self.token = make_token(self.database, LOCAL_OWNER, Role.ADMIN)
            self.turn = itertools.count()
            self.relay = self.stack.enter_context(FaultyProxy(self._api, seed, rate=0.0, delay=LATEST))
            TRAINERS.wait_ready()
            self.parts = [Part(self, role, name) for role, name in _process_roles(engine)]
            self.stack.callback(self._end)
            for part in self.parts:
                part.start()
            for part in self.parts:
                wait_for(lambda part=part: part.ready() or not part.alive, f"{part.name} to be ready", _START_DEADLINE)  # type: ignore[misc]
                assert part.alive, part.log()
        except BaseException:
            self.stack.close()
            raise

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _api(self) -> str:
        """The next API that listens, in turn; a refused connection where there is none."""
        urls = [part.url for part in self.parts if part.role != "reconciler" and part.alive]
        known = [url for url in urls if url is not None]
        return known[next(self.turn) % len(known)] if known else "http://127.0.0.1:9"

    def parts_of(self, *roles: control_plane_process.Role) -> list[Part]:
        return [part for part in self.parts if part.role in roles]

    def read(self, query: Callable[[Any], Any]) -> Any:
        """What ``query`` of a session gives; None while the database does not answer."""
        try:
            with self.database.read() as session:
                return query(session)
        except SQLAlchemyError:
            return None

    def phases(self) -> dict[str, tuple[JobPhase, str | None]] | None:
        """Of all jobs, with the reason; None while the database does not answer."""
        rows = self.read(lambda session: session.execute(sa.select(Job.id, Job.phase, Job.reason)).all())
        return None if rows is None else {row[0]: (row[1], row[2]) for row in rows}

    def newest(self, job_id: str) -> AttemptPaths | None:
        """The newest attempt on the disk."""
        root = self.paths.job(job_id).root / "attempts"
        try:
            numbers = [int(path.name) for path in root.iterdir() if path.name.isdigit()]
        except OSError:
            return None
        return self.paths.job(job_id).attempt(max(numbers)) if numbers else None

    def job_processes(self) -> list[int]:
        """Live processes of attempts, by the environment that all of them inherit, or by their directory."""
        jobs = os.fsencode(str(self.paths.jobs))
        return [pid for pid in processes_below(self.paths.home) if jobs in _environ(pid)] + list(
            processes_within(self.paths.home)
        )

    def _end(self) -> None:
        for part in self.parts:
            if part.alive:
                part.signal(signal.SIGKILL)
                part.wait()
        for pid in processes_below(self.paths.home):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes_below(self.paths.home), "the world's processes to go", 20)


def _process_roles(engine: Engine) -> list[tuple[control_plane_process.Role, str]]:
    if engine == "sqlite":
        return [("service", "service")]
    return [("api", "api-0"), ("api", "api-1"), ("reconciler", "reconciler-0"), ("reconciler", "reconciler-1")]


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def processes_within(folder: Path) -> Iterator[int]:
    """Processes whose directory is within it, whatever their environment says."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if (entry / "cwd").readlink().is_relative_to(folder):
                    yield int(entry.name)


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether it came true in that time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
