"""Pointers to a user's running services, by which ``ratchet`` finds the services from any directory. A pointer is a file that
names the process of the service of one run directory. Private services of ``ratchet run`` have no pointers."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.paths import HomePaths
from ratchet_contract.processes.procfs import start_time
from ratchet_contract.protocol.messages import ServicePointer


def pointers_directory() -> Path:
    """Return the directory for this user's pointers, which may not exist: in a runtime directory of the user or ``/tmp``."""
    user = os.geteuid()
    for runtime in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"):
        if runtime.startswith("/") and _is_own(Path(runtime)):
            return Path(runtime) / "ratchet"
    return Path(f"/tmp/ratchet-{user}")


def create_pointer(home: Path) -> Path:
    """Create this process's pointer to the run directory ``home``, and return its path. Deletes pointers of ended services.
    Raises ``OSError``."""
    directory = pointers_directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(directory):
        raise PermissionError(f"{directory} belongs to another user, or is writable by others")
    for path, pointer in _read_pointers(directory):
        if not _is_running(pointer):
            path.unlink(missing_ok=True)
    started = start_time(os.getpid())
    assert started is not None
    made = directory / f"{HomePaths(home).instance_id}.json"
    pointer = ServicePointer(home=str(home), pid=os.getpid(), start_time=started)
    write_atomic(made, pointer.model_dump_json().encode(), durable=False)
    return made


def remove_pointer(pointer: Path) -> None:
    """Delete the pointer if it is this process's. Errors are ignored."""
    with suppress(OSError, ValidationError):
        if ServicePointer.model_validate_json(pointer.read_bytes()).pid == os.getpid():
            pointer.unlink()


def running_services() -> list[Path]:
    """Return the run directories, sorted, of this user's services that run on this machine and have a pointer."""
    directory = pointers_directory()
    if not _is_own(directory):
        return []
    return sorted(Path(pointer.home) for _, pointer in _read_pointers(directory) if _is_running(pointer))


def killed_services() -> list[Path]:
    """Return the run directories, sorted, of this user's services that ended without cleaning up, if their pointers are left."""
    directory = pointers_directory()
    if not _is_own(directory):
        return []
    left = [Path(pointer.home) for _, pointer in _read_pointers(directory) if not _is_running(pointer)]
    return sorted(home for home in left if HomePaths(home).service_file.exists())


def _is_running(pointer: ServicePointer) -> bool:
    """True if the process that the pointer names is running."""
    return start_time(pointer.pid) == pointer.start_time


def _read_pointers(directory: Path) -> Iterator[tuple[Path, ServicePointer]]:
    """Yield path and content of every valid pointer in the directory, also of services that have ended."""
    for path in directory.glob("*.json"):
        with suppress(OSError, ValidationError):
            yield path, ServicePointer.model_validate_json(path.read_bytes())


def _is_own(directory: Path) -> bool:
    """Return True if the path is a directory (no link) that this user owns and no other may write to."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
