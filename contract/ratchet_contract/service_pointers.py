"""Where a user's running services are, so that ``ratchet`` finds them from any directory: one small file for each run directory.

They lie in the user's runtime directory: in ``ratchet`` below ``XDG_RUNTIME_DIR``, else below ``/run/user/UID``, else in
``/tmp/ratchet-UID``. The address itself is not in them, but in the run directory's ``service.json``. A service makes the file
while it runs. One that a killed service left behind names no service that runs, since no process has its pid and start time, and
the next service removes it. A directory that is another user's, or that others may write to, is neither written to nor read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from ratchet_contract.messages import ServicePointer
from ratchet_contract.paths import HomePaths
from ratchet_contract.process_start import start_time


def pointers_directory() -> Path:
    """Where this user's pointers are, or would be."""
    user = os.geteuid()
    for runtime in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"):
        if runtime.startswith("/") and _is_own(Path(runtime)):
            return Path(runtime) / "ratchet"
    return Path(f"/tmp/ratchet-{user}")


def announce(home: Path) -> Path:
    """Make this process's pointer to the run directory ``home``, by rename, and remove those of services that have ended.

    Raises ``OSError``.
    """
    directory = pointers_directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(directory):
        raise PermissionError(f"{directory} is another user's, or others may write to it")
    for path, pointer in _read(directory):
        if not _runs(pointer):
            path.unlink(missing_ok=True)
    started = start_time(os.getpid())
    assert started is not None
    made = directory / f"{HomePaths(home).instance}.json"
    partial = made.with_suffix(".tmp")  # one name for each run directory: what a kill leaves is written over
    partial.write_text(ServicePointer(home=str(home), pid=os.getpid(), start_time=started).model_dump_json())
    return partial.rename(made)


def withdraw(pointer: Path) -> None:
    """Remove the pointer if it is this process's."""
    with suppress(OSError, ValidationError):
        if ServicePointer.model_validate_json(pointer.read_bytes()).pid == os.getpid():
            pointer.unlink()


def running() -> list[Path]:
    """Run directories of this user's services that run on this machine, sorted."""
    directory = pointers_directory()
    if not _is_own(directory):
        return []
    return sorted(Path(pointer.home) for _, pointer in _read(directory) if _runs(pointer))


def killed() -> list[Path]:
    """Run directories of this user's services that ended without a word: their ``service.json`` is there still."""
    directory = pointers_directory()
    if not _is_own(directory):
        return []
    left = [Path(pointer.home) for _, pointer in _read(directory) if not _runs(pointer)]
    return sorted(home for home in left if HomePaths(home).service_file.exists())


def _runs(pointer: ServicePointer) -> bool:
    return start_time(pointer.pid) == pointer.start_time


def _read(directory: Path) -> Iterator[tuple[Path, ServicePointer]]:
    for path in directory.glob("*.json"):
        with suppress(OSError, ValidationError):
            yield path, ServicePointer.model_validate_json(path.read_bytes())


def _is_own(directory: Path) -> bool:
    """Whether it is a directory, no link to one, of this user, that nobody else may write to."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
