"""A service of its own on a run directory of its own, of which nothing is left: no process, no file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from ratchet_client.cli.signals import interruptible, undisturbed
from ratchet_client.client import RatchetClient
from ratchet_client.errors import DeadlineReached
from ratchet_contract import environment
from ratchet_contract.errors import RatchetError
from ratchet_contract.messages import ServiceFile
from ratchet_contract.paths import HomePaths

ROOM: Final = 512 << 20
START_SECONDS: Final = 60.0
_SECONDS: Final = 600.0  # for one answer: comparing checkpoints takes as long as reading them
END_SECONDS: Final = 20.0
_JOBS_AT_ONCE: Final = 2
"""Jobs per core: half of a small job's life is waiting (imports, meeting, files), and thread counts are fixed either way."""


class CannotStart(RatchetError):
    """There is no place for the directory, or the service did not come up."""


def wait_for(condition: Callable[[], bool], what: str, seconds: float, period: float = 0.05) -> None:
    """Raises ``DeadlineReached`` when ``condition`` is not true within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise DeadlineReached(f"waited {seconds:g} s for {what}")
        time.sleep(period)


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
            process = _start(root, slots)
            paths = HomePaths(root)
            _wait_ready(process, paths)
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


def _start(root: Path, slots: int) -> subprocess.Popen[bytes]:
    """``ratchet serve`` by its own module; nothing of this shell's Ratchet variables: never the user's own database. Its pointer
    goes into ``root`` too: no other command is to find it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RATCHET_")}
    environ["XDG_RUNTIME_DIR"] = str(root)
    slots = max(slots, _JOBS_AT_ONCE * max(2, len(os.sched_getaffinity(0))))
    with (root / "service.log").open("wb") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "ratchet_service",
                "serve",
                "--home",
                str(root),
                "--port",
                "0",
                "--cpu-slots",
                str(slots),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
        )


def _wait_ready(process: subprocess.Popen[bytes], paths: HomePaths) -> None:
    def ready() -> bool:
        if process.poll() is not None:
            log = (paths.home / "service.log").read_text(errors="replace").strip().splitlines()
            raise CannotStart(
                f"`ratchet serve` ended with {process.returncode}: {log[-1] if log else 'it said nothing'}"
            )
        try:
            ServiceFile.model_validate_json(paths.service_file.read_bytes())
        except (OSError, ValidationError):
            return False
        return True

    try:
        wait_for(ready, "`ratchet serve` to listen", START_SECONDS)
    except DeadlineReached as error:
        raise CannotStart(error.detail) from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """No clean end is needed for what is thrown away. Its group: interpreters that it asks; agents have sessions of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
    needle = os.fsencode(f"{environment.ATTEMPT_DIR}={root}/")
    try:
        return any(pair.startswith(needle) for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False


def _remove(root: Path) -> None:
    def make_writable(_function: Any, path: str, _error: Any) -> None:
        with suppress(OSError):  # a snapshot of code is read-only
            Path(path).parent.chmod(0o700)
            Path(path).unlink()

    shutil.rmtree(root, onerror=make_writable)
    shutil.rmtree(root, ignore_errors=True)
