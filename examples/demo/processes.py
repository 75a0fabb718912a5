"""The demo's processes: its own service, the agents and ranks that the service starts, and their certain end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from ratchet_client import RatchetClient
from ratchet_contract import env_vars
from ratchet_contract.paths import AttemptPaths, HomePaths


class DemoError(Exception):
    """Something that was expected did not happen; the sentence says what and where to look."""


def wait_for(what: str, happened: Callable[[], Any], seconds: float, where: Path) -> Any:
    """The first true value of ``happened()``. Raises ``DemoError`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not (value := happened()):
        if time.monotonic() > end:
            raise DemoError(f"waited {seconds:.0f} s for {what}, in vain. Logs: {where}")
        time.sleep(0.1)
    return value


class Service:
    """``python -m ratchet_service serve`` on SQLite and a free port, with a run directory of its own. ``options``: more of its
    command line."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        self.options = options
        self.log = home / "service.log"
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.client = RatchetClient(home=home, retry_for=20.0)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, port: int = 0) -> str:
        """Start it and return its address once it answers. ``port``: 0 is a free one."""
        self.home.mkdir(parents=True, exist_ok=True)
        file = HomePaths(self.home).service_file
        command = [
            sys.executable,
            "-m",
            "ratchet_service",
            "serve",
            "--home",
            str(self.home),
            "--port",
            str(port),
            *self.options,
        ]
        with self.log.open("ab") as log:
            self._process = self._begin(command, log.fileno(), _environment(self.home))
        wait_for("the service to answer", lambda: self._announced(file) and self.client.ready(), 60.0, self.log)
        self.url = str(json.loads(file.read_text())["url"])
        return self.url

    def _begin(self, command: list[str], log: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        """In a session of its own: Ctrl-C reaches only the demo, which then ends everything in order."""
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env
        )

    def _announced(self, file: Path) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise DemoError(f"the service ended at once with status {self._process.returncode}. Its log: {self.log}")
        return file.exists() and json.loads(file.read_text())["pid"] == self.pid

    def count_parked(self) -> int:
        """How many agents it has parked, with all imports made."""
        text = httpx.get(f"{self.url}/metrics").text
        return int(
            float(next(line for line in text.splitlines() if line.startswith("ratchet_parked_agents ")).split()[1])
        )

    def kill(self) -> None:
        """SIGKILL: no clean-up, no goodbye."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End the service, then every agent and rank that is left."""
        self.client.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10.0)
            if self._process.poll() is None:
                self.kill()
        end = time.monotonic() + 10.0
        while left := living(self.home):
            if time.monotonic() > end:
                raise DemoError(f"processes {sorted(left)} did not end")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _environment(home: Path) -> dict[str, str]:
    """This process's variables without those that would lead the service elsewhere (RATCHET_STANDBY does not). torch's compiler
    makes a directory for its cache as soon as it is imported: it goes with ``home``, where nobody has said otherwise."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RATCHET_") or k == env_vars.STANDBY}
    return {"TORCHINDUCTOR_CACHE_DIR": str(home / "torchinductor"), **kept}


def living(home: Path) -> set[int]:
    """Pids of agents and ranks that work below ``home``: their environment or command line names it."""
    marks = (f"{env_vars.LAUNCH_FILE}={home}/".encode(), f"{home}/jobs/".encode())
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            # A process that has ended and is not yet reaped has an empty environment and command line.
            if marks[0] in (entry / "environ").read_bytes() or marks[1] in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


def spool(attempt: AttemptPaths, rank: int) -> Iterator[dict[str, Any]]:
    """What a rank has reported so far, read from its file, without the service."""
    with contextlib.suppress(FileNotFoundError):
        for line in attempt.spool(rank).read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield json.loads(line)


def rank_pid(attempt: AttemptPaths, rank: int) -> int | None:
    """The process id a rank reported when it started."""
    return next((m["pid"] for m in spool(attempt, rank) if m["kind"] == "started"), None)


def reported_step(attempt: AttemptPaths) -> int:
    """The newest step in rank 0's reports."""
    return max((m["step"] for m in spool(attempt, 0) if m["kind"] in ("progress", "metrics")), default=0)
