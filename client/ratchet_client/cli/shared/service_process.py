"""Runs ``ratchet serve`` as a child process for one command.

Callers pass the environment of ``without_ratchet_variables``, so that the service uses SQLite in its run directory.
"""

from __future__ import annotations

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
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import ServiceFile

START_SECONDS: Final = 60.0
END_SECONDS: Final = 20.0


class CannotStart(RatchetError):
    """The service did not start or cannot be started here, or there is no space for its run directory."""


def wait_for(condition: Callable[[], bool], what: str, seconds: float, period: float = 0.05) -> None:
    """Block until ``condition`` returns true. Raise ``DeadlineReached`` after ``seconds``; ``what``: the awaited event, for the
    message."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise DeadlineReached(f"waited {seconds:g} s for {what}")
        time.sleep(period)


def without_ratchet_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environ`` without the RATCHET_ variables, which may configure another service. RATCHET_STANDBY is kept:
    it says how many processes this machine can spare."""
    return {n: value for n, value in environ.items() if not n.startswith("RATCHET_") or n == env_vars.STANDBY}


def start_service(paths: HomePaths, environ: Mapping[str, str], *options: str) -> subprocess.Popen[bytes]:
    """Start a service at a free port for an existing run directory, and return its process at once. ``options``: more arguments
    of ``serve``. Raise ``CannotStart`` if ``fastapi`` is not installed."""
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
    """Block until the service listens. Raise ``CannotStart`` if it ends first or takes too long; the process may still run
    then."""

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
    """Return the content of the run directory's ``service.json``, which a killed service leaves behind; None if it is missing,
    invalid or unreadable."""
    with suppress(OSError, ValidationError):
        return ServiceFile.model_validate_json(paths.service_file.read_bytes())
    return None


def kill_attempts(root: Path) -> None:
    """Kill the processes for which ``was_started_below`` holds with the run directory ``root``. Blocks until they have ended, up
    to ``END_SECONDS``."""
    root = root.resolve()  # as the service writes it

    procfs.kill_until_gone(
        lambda: [
            pid for pid, folder in procfs.processes_with_variable(env_vars.ATTEMPT_DIR) if folder.startswith(f"{root}/")
        ],
        END_SECONDS,
    )


def was_started_below(pid: int, root: Path) -> bool:
    """Return True if the process was started for an attempt below ``root``, a resolved path, as far as its environment shows."""
    try:
        return (procfs.environment_variable(pid, env_vars.ATTEMPT_DIR) or "").startswith(f"{root}/")
    except OSError:
        return False
