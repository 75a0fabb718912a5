"""Runs ``ratchet serve`` as a child process for one command: at a free port, in its own process session.

The caller passes the environment of ``without_ratchet_variables``, so that the service uses SQLite in its run directory.
"""

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

from ratchet_client.http.errors import DeadlineReached
from ratchet_contract import env_vars
from ratchet_contract.errors import RatchetError
from ratchet_contract.paths import HomePaths
from ratchet_contract.protocol.messages import ServiceFile

START_SECONDS: Final = 60.0
END_SECONDS: Final = 20.0


class CannotStart(RatchetError):
    """The service did not start, it cannot be started from this installation, or there is no space for its run directory."""


def wait_for(condition: Callable[[], bool], what: str, seconds: float, period: float = 0.05) -> None:
    """Block until ``condition`` returns true; it is called every ``period`` seconds. Raises ``DeadlineReached`` after
    ``seconds``; ``what``: the awaited event, for its message."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise DeadlineReached(f"waited {seconds:g} s for {what}")
        time.sleep(period)


def without_ratchet_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environ`` without the RATCHET_ variables, which configure the user's other services, so that a private
    service never uses their database."""
    return {name: value for name, value in environ.items() if not name.startswith("RATCHET_")}


def start_service(paths: HomePaths, environ: Mapping[str, str], *options: str) -> subprocess.Popen[bytes]:
    """Start the service at a free port, as a child process in its own process session, and return the process without waiting
    until it listens. Its output is appended to ``service.log`` in the run directory, which must exist. ``environ``: the complete
    environment of the service; ``options``: more arguments of ``serve``. Raises ``CannotStart`` if this installation has no
    service."""
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
    """Block until the service listens. Raises ``CannotStart`` if it ends first, or does not listen within ``START_SECONDS``; the
    process is not killed then."""

    def ready() -> bool:
        """Return True if ``service.json`` names the started process. Raises ``CannotStart`` if that process has ended."""
        if process.poll() is not None:
            log = paths.service_log.read_text(errors="replace").strip().splitlines()
            raise CannotStart(
                f"`ratchet serve` ended with {process.returncode}: {log[-1] if log else 'it printed nothing'}"
            )
        found = service_file(paths)
        return found is not None and found.pid == process.pid  # not the file of a killed service

    try:
        wait_for(ready, "`ratchet serve` to listen", START_SECONDS)
    except DeadlineReached as error:
        raise CannotStart(error.detail) from None


def service_file(paths: HomePaths) -> ServiceFile | None:
    """Return the content of ``service.json`` in the run directory; None if it does not exist, cannot be read or is invalid. A
    killed service leaves it behind."""
    with suppress(OSError, ValidationError):
        return ServiceFile.model_validate_json(paths.service_file.read_bytes())
    return None


def kill_attempts(root: Path) -> None:
    """Kill (SIGKILL) every process that was started for an attempt below the run directory ``root``. Block until none is left,
    for at most ``END_SECONDS``; then return without an error. Processes whose environment is not readable are not found."""
    root = root.resolve()  # as the service writes it

    def none_left() -> bool:
        """Kill all such processes that exist now. Return True if there were none."""
        found = [pid for pid in _pids() if was_started_below(pid, root)]
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not found

    with suppress(DeadlineReached):  # stuck in the kernel: nothing more can be done
        wait_for(none_left, "killed processes to end", END_SECONDS, 0.02)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def was_started_below(pid: int, root: Path) -> bool:
    """Return True if the environment of the process shows that it was started for an attempt below ``root``, an absolute path
    without symbolic links. False for zombies, whose environment is empty, and for processes whose environment is not readable."""
    try:
        return (environment_variable(pid, env_vars.ATTEMPT_DIR) or "").startswith(f"{root}/")
    except OSError:
        return False


def environment_variable(pid: int, name: str) -> str | None:
    """Return the value of ``name`` in the environment that the process was started with; None if it is not set. Raises
    ``OSError`` if the environment is not readable."""
    needle = os.fsencode(f"{name}=")
    for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if pair.startswith(needle):
            return os.fsdecode(pair[len(needle) :])
    return None
