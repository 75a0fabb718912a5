"""The service of a ``ratchet run``: a running one, or a private one that is started for the command and ends with it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.service_process import (
    CannotStart,
    kill_attempts,
    service_file,
    start_service,
    wait_for,
    wait_ready,
    without_ratchet_variables,
)
from ratchet_client.cli.shared.signals import signals_ignored
from ratchet_client.resources.client import RatchetClient
from ratchet_contract import env_vars
from ratchet_contract.errors import Refused
from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import parent_death
from ratchet_contract.processes.procfs import environment_variable, start_time

COMMAND_FILE: Final = "command.txt"
"""The command as typed; the file is in a private run directory while the command can continue its job."""
LOCK_FILE: Final = "command.lock"
"""In the same directory: locked by the running command, and contains its pid."""
_END_SECONDS: Final = 30.0
_CLOSED_SECONDS: Final = 2.0
"""A killed process may close its port up to this many seconds before it can be waited for."""
_RESTART_SECONDS: Final = 10.0


class RunService:
    """The service that a ``ratchet run`` uses. ``paths``: its run directory. ``private``: it was started for this command."""

    def __init__(self, paths: HomePaths, *, private: bool) -> None:
        self.paths = paths
        self.private = private
        self._process: subprocess.Popen[bytes] | None = None
        self._next_start = 0.0

    def start(self) -> None:
        """Start a private service unless it runs, and block until it listens. Raise ``CannotStart`` if it does not start."""
        if not self.private or (self._process is not None and self._process.poll() is None):
            return
        own = {env_vars.ENDS_WITH: parent_death.process_name(os.getpid())}
        self._process = start_service(self.paths, without_ratchet_variables(os.environ) | own)
        wait_ready(self._process, self.paths)

    def restart_if_ended(self) -> bool:
        """Start a private service again if it has ended. Return True if it had ended, even if it does not start again. Return
        False if it still runs, or if the service is not private. For some seconds after a failed start, no start is tried. May
        wait for a moment, since the service may be about to end."""
        if self._process is None:
            return False
        try:
            self._process.wait(_CLOSED_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        if time.monotonic() < self._next_start:
            return True
        output.note("the service of this command ended: restarting it; training continues meanwhile")
        try:
            self.start()
        except CannotStart as error:
            output.note(f"it does not start: {error.detail}")
            self._next_start = time.monotonic() + _RESTART_SECONDS
        return True

    def stop(self) -> None:
        """Stop a private service and block until it has ended; it is killed after 30 seconds."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """Kill a private service and all its ranks without a checkpoint. Does nothing for a service that is not private."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            kill_attempts(self.paths.home)


@contextmanager
def run_service(base: Path, name: str) -> Iterator[RunService]:
    """Yield the service to use. This is a ready service of ``base``, or of ``run/NAME`` below it, that does not end with a
    ``ratchet run``. If there is none, a private service is started in ``run/NAME``, and stopped on exit. Raise ``CannotStart``,
    the errors of ``_lock``, or ``DeadlineReached`` if the service of a killed command does not end."""
    paths = HomePaths(HomePaths(base).runs / name)
    for shared in (HomePaths(base), paths):
        if _owner(shared) == "" and _is_responding(shared):
            output.note(f"using the service of {shared.home}")
            yield RunService(shared, private=False)
            return
    with _lock(paths):
        if _owner(paths):  # its command was killed, and it will end when it notices
            wait_for(lambda: not _owner(paths), f"the end of the service of a killed `ratchet run` in {paths.home}", 30)
        service = RunService(paths, private=True)
        try:
            service.start()
            yield service
        finally:
            with signals_ignored():
                service.stop()


@contextmanager
def _lock(paths: HomePaths) -> Iterator[None]:
    """Create the run directory, and lock it for this command during the block. Raise ``Refused`` if another command has locked
    it, or if it cannot be created or locked."""
    with ExitStack() as stack:
        try:
            paths.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context((paths.home / LOCK_FILE).open("a+", encoding="utf-8"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise Refused(
                f"the same command is already running (pid {lock.read().strip() or 'unknown'}): wait for its end, or give this "
                "one a directory of its own with --name"
            ) from None
        except OSError as error:
            raise Refused(
                f"{paths.home} cannot be made, or locked ({error.strerror}): `ratchet --home DIR run ...` keeps the job elsewhere"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _is_responding(paths: HomePaths) -> bool:
    """Return True if the service of this run directory responds and is ready."""
    with RatchetClient(home=paths.home, retry_for=1.0) as client:
        return client.ready()


def _owner(paths: HomePaths) -> str | None:
    """Return the name of the ``ratchet run`` process with which this run directory's service ends. Return "" for a service that
    ends with no command. Return None if no service runs or its environment cannot be read."""
    found = service_file(paths)
    if found is None or start_time(found.pid) is None:
        return None
    with suppress(OSError):
        return environment_variable(found.pid, env_vars.ENDS_WITH) or ""
    return None


def unfinished_elsewhere(paths: HomePaths, name: str) -> list[str]:
    """Return the ``ratchet run`` commands that have an unfinished job named ``name`` in another run directory next to
    ``paths``, as their files ``COMMAND_FILE`` show."""
    found = []
    for file in paths.home.parent.glob(f"{name}-*/{COMMAND_FILE}"):
        if file.parent != paths.home and file.parent.name.rpartition("-")[0] == name:
            with suppress(OSError):
                found.append(file.read_text(encoding="utf-8"))
    return sorted(found)
