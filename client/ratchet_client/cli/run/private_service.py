"""The service of a ``ratchet run``: the one that runs already, or one that is started for it and ends with it."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from ratchet_client.cli import output
from ratchet_client.cli.service_process import (
    CannotStart,
    service_file,
    start_service,
    sweep,
    variable_of,
    wait_for,
    wait_ready,
    without_ratchets,
)
from ratchet_client.cli.signals import undisturbed
from ratchet_client.client import RatchetClient
from ratchet_contract import environment, parent_death
from ratchet_contract.errors import Refused
from ratchet_contract.paths import HomePaths
from ratchet_contract.process_start import start_time

COMMAND_FILE: Final = "command.txt"
"""In a private run directory while its job has not ended: what was typed."""
LOCK_FILE: Final = "command.lock"
"""There, too: locked by the command that runs, whose pid it holds."""
_END_SECONDS: Final = 30.0
_CLOSED_SECONDS: Final = 2.0
"""A killed process closes its port up to so long before it can be waited for."""


class RunService:
    """``paths``: its run directory. ``private``: it was started for this command, and ends with it."""

    def __init__(self, paths: HomePaths, *, private: bool) -> None:
        self.paths = paths
        self.private = private
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Nothing for a service that is not private, or that runs. Raises ``CannotStart``."""
        if not self.private or (self._process is not None and self._process.poll() is None):
            return
        own = {environment.ENDS_WITH: parent_death.name_of(os.getpid())}
        self._process = start_service(self.paths, without_ratchets(os.environ) | own)
        wait_ready(self._process, self.paths)

    def revive(self) -> bool:
        """After it did not answer: True where it was killed, and is started again; agents go on meanwhile."""
        if self._process is None:
            return False
        try:
            self._process.wait(_CLOSED_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        output.note("the service of this command ended: it is started again; training goes on meanwhile")
        try:
            self.start()
        except CannotStart as error:
            output.note(f"it does not start: {error.detail}")
        return True

    def end(self) -> None:
        """Of a private one nothing is left; agents of other jobs of its run directory save and end by themselves."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def end_at_once(self) -> None:
        """The ranks of a private one, too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            sweep(self.paths.home)


@contextmanager
def run_service(base: Path, name: str) -> Iterator[RunService]:
    """The service that runs for the run directory ``base``; else a private one, in ``run/NAME`` below it. Raises ``CannotStart``,
    and ``Refused`` where another ``ratchet run`` has that already."""
    paths = HomePaths(HomePaths(base).runs / name)
    for shared in (HomePaths(base), paths):
        if _owner(shared) == "" and _answers(shared):
            output.note(f"using the service of {shared.home}")
            yield RunService(shared, private=False)
            return
    with _lock(paths):
        if _owner(paths):  # its command was killed, and it is about to notice
            wait_for(lambda: not _owner(paths), f"the end of the service of a killed `ratchet run` in {paths.home}", 30)
        service = RunService(paths, private=True)
        try:
            service.start()
            yield service
        finally:
            with undisturbed():
                service.end()


@contextmanager
def _lock(paths: HomePaths) -> Iterator[None]:
    """No other command uses this run directory meanwhile. Raises ``Refused`` where one does, and where it cannot be made."""
    with ExitStack() as stack:
        try:
            paths.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context((paths.home / LOCK_FILE).open("a+", encoding="utf-8"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise Refused(
                f"the same command runs already (pid {lock.read().strip() or 'not known yet'}): wait for its end, or give this "
                "one a place of its own with --name"
            ) from None
        except OSError as error:
            raise Refused(
                f"{paths.home} cannot be made, or locked ({error.strerror}): `ratchet --home DIR run ...` keeps the job elsewhere"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _answers(paths: HomePaths) -> bool:
    with RatchetClient(home=paths.home, retry_for=1.0) as client:
        return client.ready()


def _owner(paths: HomePaths) -> str | None:
    """None: no service runs there. Else the process that it ends with, as ``parent_death`` names it; empty: it ends with none."""
    found = service_file(paths)
    if found is None or start_time(found.pid) is None:
        return None
    with suppress(OSError):
        return variable_of(found.pid, environment.ENDS_WITH) or ""
    return None


def unfinished_elsewhere(paths: HomePaths, name: str) -> list[str]:
    """Commands of ``ratchet run`` for jobs named ``name`` beside this run directory whose job has not ended."""
    found = []
    for file in paths.home.parent.glob(f"{name}-*/{COMMAND_FILE}"):
        if file.parent != paths.home:
            with suppress(OSError):
                found.append(file.read_text(encoding="utf-8"))
    return sorted(found)
