"""``ratchet serve`` as a process that a command starts for itself: on SQLite, at a free port, in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from ratchet_client.errors import DeadlineReached
from ratchet_contract import environment
from ratchet_contract.errors import RatchetError
from ratchet_contract.messages import ServiceFile
from ratchet_contract.paths import HomePaths

START_SECONDS: Final = 60.0
END_SECONDS: Final = 20.0


class CannotStart(RatchetError):
    """There is no place for the run directory, or the service did not come up."""


def wait_for(condition: Callable[[], bool], what: str, seconds: float, period: float = 0.05) -> None:
    """Raises ``DeadlineReached`` when ``condition`` is not true within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise DeadlineReached(f"waited {seconds:g} s for {what}")
        time.sleep(period)


def without_ratchets(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what a shell has set for other services: never the user's own database."""
    return {name: value for name, value in environ.items() if not name.startswith("RATCHET_")}


def start_service(paths: HomePaths, environ: Mapping[str, str], *options: str) -> subprocess.Popen[bytes]:
    """Start it by its own module; its output is appended to ``service.log`` in the run directory, which is there. Raises
    ``CannotStart`` where this installation has no service."""
    if find_spec("fastapi") is None:
        raise CannotStart(
            f'{sys.executable} has no fastapi: {sys.executable} -m pip install "ratchet-train[service,worker]"'
        )
    command = [sys.executable, "-P", "-m", "ratchet_service", "serve", "--home", str(paths.home), "--port", "0"]
    with paths.service_log.open("ab") as log:
        return subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environ),
            start_new_session=True,
        )


def wait_ready(process: subprocess.Popen[bytes], paths: HomePaths) -> None:
    """Until the service answers. Raises ``CannotStart`` when it ends before, or does not within ``START_SECONDS``."""

    def ready() -> bool:
        if process.poll() is not None:
            log = paths.service_log.read_text(errors="replace").strip().splitlines()
            raise CannotStart(
                f"`ratchet serve` ended with {process.returncode}: {log[-1] if log else 'it said nothing'}"
            )
        found = service_file(paths)
        return found is not None and found.pid == process.pid  # not of one that was killed

    try:
        wait_for(ready, "`ratchet serve` to listen", START_SECONDS)
    except DeadlineReached as error:
        raise CannotStart(error.detail) from None


def service_file(paths: HomePaths) -> ServiceFile | None:
    """What ``service.json`` says, if it is there; a killed service leaves it."""
    with suppress(OSError, ValidationError):
        return ServiceFile.model_validate_json(paths.service_file.read_bytes())
    return None


def sweep(root: Path) -> None:
    """Kill every process that was started for an attempt below ``root``, until there is none."""

    def none_left() -> bool:
        found = [pid for pid in _pids() if started_below(pid, root)]
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not found

    with suppress(DeadlineReached):  # stuck in the kernel: nobody can do more
        wait_for(none_left, "killed processes to go", END_SECONDS, 0.02)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def started_below(pid: int, root: Path) -> bool:
    """Whether a process was started for an attempt below ``root``, by its environment: a zombie's is empty, another user's
    may not be read."""
    try:
        return (variable_of(pid, environment.ATTEMPT_DIR) or "").startswith(f"{root}/")
    except OSError:
        return False


def variable_of(pid: int, name: str) -> str | None:
    """What ``name`` was set to when that process was started. Raises ``OSError`` where that may not be read."""
    needle = os.fsencode(f"{name}=")
    for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if pair.startswith(needle):
            return os.fsdecode(pair[len(needle) :])
    return None
