"""A temporary service on a temporary run directory; neither processes nor files remain afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ratchet_client.cli.shared.service_process import (
    CannotStart,
    kill_attempts,
    start_service,
    wait_ready,
    without_ratchet_variables,
)
from ratchet_client.cli.shared.signals import interruptible, signals_ignored
from ratchet_client.resources.client import RatchetClient
from ratchet_contract.paths import HomePaths

ROOM: Final = 512 << 20
_SECONDS: Final = 600.0  # timeout of one request: comparing checkpoints takes as long as reading them
_JOBS_AT_ONCE: Final = 2
"""Jobs per core: a small job waits for half of its time (imports, rendezvous, files), and thread counts are fixed either way."""


@contextmanager
def temporary_service(home: Path, *, slots: int = 0) -> Iterator[tuple[RatchetClient, HomePaths]]:
    """Start a service on a temporary run directory, next to ``home`` if possible, and yield a client and the directory's
    paths. On exit the service and its ranks are killed and the directory is removed. ``slots``: minimum number of CPU slots.
    Raise ``CannotStart`` if the service cannot be started."""
    root: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    with interruptible():
        try:
            root = _directory(home)
            paths = HomePaths(root)
            process = _start(paths, slots)
            wait_ready(process, paths)
            with RatchetClient(home=root, retry_for=5.0, timeout=_SECONDS) as client:
                yield client, paths
        finally:
            with signals_ignored():
                if process is not None:
                    _kill(process)
                if root is not None:
                    kill_attempts(root)
                    _remove(root)


def _directory(home: Path) -> Path:
    """Create a temporary run directory, next to ``home`` if possible, and return it. Raise ``CannotStart`` if no place can
    be used."""
    places = [home.parent, Path(tempfile.gettempdir())]
    for place in places:
        with suppress(OSError):
            if shutil.disk_usage(place).free >= ROOM:
                return Path(tempfile.mkdtemp(prefix=".ratchet-doctor-", dir=place)).resolve()
    raise CannotStart(f"no room for a run directory of {ROOM >> 20} MiB in {' or '.join(map(str, places))}")


def _start(paths: HomePaths, slots: int) -> subprocess.Popen[bytes]:
    """Start the service and return its process. ``slots``: minimum number of CPU slots."""
    # Its pointer file is in the run directory, so that no other command finds the service.
    environ = without_ratchet_variables(os.environ) | {"XDG_RUNTIME_DIR": str(paths.home)}
    slots = max(slots, _JOBS_AT_ONCE * max(2, len(os.sched_getaffinity(0))))
    return start_service(paths, environ, "--cpu-slots", str(slots))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the service's process group without a clean shutdown, and wait until the service has ended."""
    # The group includes the interpreters that the service queries; agents are in sessions of their own.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remove(root: Path) -> None:
    """Remove the run directory with all files, also those in read-only directories. Errors are ignored."""

    def make_writable(_function: Any, path: str, _error: Any) -> None:
        with suppress(OSError):  # a snapshot of code is read-only
            Path(path).parent.chmod(0o700)
            Path(path).unlink()

    shutil.rmtree(root, onerror=make_writable)
    shutil.rmtree(root, ignore_errors=True)
