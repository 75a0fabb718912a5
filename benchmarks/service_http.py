"""Processes and connections of the service's benchmarks."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ratchet_contract.api.roles import LOCAL_OWNER, Role
from ratchet_service.db.engine import Database
from ratchet_worker.ipc.child_processes import die_with_parent
from tests.support.tokens import make_token

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_KEPT: Final = 3.0
"""Seconds; uvicorn closes a connection that was idle for five."""


class Link:
    """One connection that is kept, like a client's or an agent's."""

    def __init__(self, url: str, token: str | None = None) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
        self._used = time.monotonic()
        self.etag: str | None = None
        """Of the last answer."""
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def close(self) -> None:
        self._connection.close()

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[float, Any]:
        """Seconds until the whole answer was there, and its data (text where it is no JSON). Raises ``RuntimeError``."""
        data = None if body is None else json.dumps(body).encode()
        more = {key.replace("_", "-"): value for key, value in headers.items()}
        if time.monotonic() - self._used > _KEPT:
            self._connection.close()  # the server does by now
        self._used = time.monotonic()
        begin = time.perf_counter()
        self._connection.request(method, path, data, self._headers | more)
        answer = self._connection.getresponse()
        told = answer.read()
        seconds = time.perf_counter() - begin
        self.etag = answer.headers.get("ETag")
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status}: {told[:500].decode(errors='replace')}")
        if "json" not in answer.headers.get("Content-Type", ""):
            return seconds, told.decode()
        return seconds, json.loads(told or b"null")


def admin_token(database_url: str | None) -> str | None:
    """For a service on PostgreSQL, which wants one; None for SQLite, which does not."""
    if database_url is None:
        return None
    database = Database(database_url)
    token = make_token(database, LOCAL_OWNER, Role.ADMIN)
    database.dispose()
    return token


@contextlib.contextmanager
def process(command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m ...`` while the block runs; asked to end, then killed; killed with this process, too."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RATCHET_")} | (env or {})
    with log.open("ab") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=clean,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    try:
        yield running
    finally:
        running.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(timeout=15)
        running.kill()
        running.wait()


def until_written(path: Path, of: subprocess.Popen[bytes], log: Path, seconds: float = 60.0) -> str:
    """What a process writes into ``path`` once it is ready. Raises ``RuntimeError``."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if text := path.read_text():
                return text
        if of.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"not ready: {log.read_text()[-2000:]}")
        time.sleep(0.02)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, its ended children not counted."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mb(pid: int) -> float:
    """Resident, in MB (1e6 bytes)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] * 1e3, ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3
