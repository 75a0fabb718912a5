"""A service of its own on a run directory of its own, of which nothing is left: no process, no file."""

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

from ratchet_client.cli.service_process import CannotStart, start_service, sweep, wait_ready, without_ratchets
from ratchet_client.cli.signals import interruptible, undisturbed
from ratchet_client.client import RatchetClient
from ratchet_contract.paths import HomePaths

ROOM: Final = 512 << 20
_SECONDS: Final = 600.0  # for one answer: comparing checkpoints takes as long as reading them
_JOBS_AT_ONCE: Final = 2
"""Jobs per core: half of a small job's life is waiting (imports, meeting, files), and thread counts are fixed either way."""


@contextmanager
def throw_away_service(home: Path, *, slots: int = 0) -> Iterator[tuple[RatchetClient, HomePaths]]:
    """A client of the service and its run directory, beside ``home`` if there is room, else among the temporary files. ``slots``:
    CPU slots that it has at least.

    Ctrl-C, SIGTERM and SIGHUP end the block with ``KeyboardInterrupt``; until all is cleaned up, further ones are ignored.
    Raises ``CannotStart``.
    """
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
            with undisturbed():
                if process is not None:
                    _kill(process)
                if root is not None:
                    sweep(root)
                    _remove(root)


def _directory(home: Path) -> Path:
    places = [home.parent, Path(tempfile.gettempdir())]
    for place in places:
        with suppress(OSError):
            if shutil.disk_usage(place).free >= ROOM:
                return Path(tempfile.mkdtemp(prefix=".ratchet-doctor-", dir=place)).resolve()
    raise CannotStart(f"no room for a run directory of {ROOM >> 20} MiB in {' or '.join(map(str, places))}")


def _start(paths: HomePaths, slots: int) -> subprocess.Popen[bytes]:
    """Its pointer goes into the run directory, too: no other command is to find it."""
    environ = without_ratchets(os.environ) | {"XDG_RUNTIME_DIR": str(paths.home)}
    slots = max(slots, _JOBS_AT_ONCE * max(2, len(os.sched_getaffinity(0))))
    return start_service(paths, environ, "--cpu-slots", str(slots))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """No clean end is needed for what is thrown away. Its group: interpreters that it asks; agents have sessions of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remove(root: Path) -> None:
    def make_writable(_function: Any, path: str, _error: Any) -> None:
        with suppress(OSError):  # a snapshot of code is read-only
            Path(path).parent.chmod(0o700)
            Path(path).unlink()

    shutil.rmtree(root, onerror=make_writable)
    shutil.rmtree(root, ignore_errors=True)
