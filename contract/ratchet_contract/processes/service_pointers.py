"""Pointers to a user's running services, so that ``ratchet`` finds them from any directory: one small file per run directory.

They are in the user's runtime directory (``pointers_directory``). They do not contain the address, which is in the run
directory's ``service.json``. A service creates its file when it starts and removes it when it ends; a service that ends
together with a command, as for ``ratchet run``, has none. A file that a killed service left names no running service, since no
process has its pid and start time; the next service that creates a pointer removes the file. A directory that belongs to
another user, or that others may write to, is neither written to nor read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from ratchet_contract.paths import HomePaths
from ratchet_contract.processes.process_start import start_time
from ratchet_contract.protocol.messages import ServicePointer


def pointers_directory() -> Path:
    """Return the directory for this user's pointers, which may not exist: ``ratchet`` in the first of ``XDG_RUNTIME_DIR`` and
    ``/run/user/UID`` that this user owns and no other user may write to (``_is_own``), else ``/tmp/ratchet-UID``."""
    user = os.geteuid()
    for runtime in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"):
        if runtime.startswith("/") and _is_own(Path(runtime)):
            return Path(runtime) / "ratchet"
    return Path(f"/tmp/ratchet-{user}")


def create_pointer(home: Path) -> Path:
    """Create this process's pointer to the run directory ``home``, or replace the one that is there, and return its path. Also
    deletes pointers of services that have ended.

    The file is created by rename. Raises ``OSError``, also if the directory belongs to another user or is writable by others.
    """
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
    partial = made.with_suffix(".tmp")  # one name per run directory: a file that a kill leaves is overwritten
    partial.write_text(ServicePointer(home=str(home), pid=os.getpid(), start_time=started).model_dump_json())
    return partial.rename(made)


def remove_pointer(pointer: Path) -> None:
    """Delete the pointer if it is this process's. Errors are ignored."""
    with suppress(OSError, ValidationError):
        if ServicePointer.model_validate_json(pointer.read_bytes()).pid == os.getpid():
            pointer.unlink()


def running_services() -> list[Path]:
    """Return the run directories of this user's services that run on this machine, sorted. Services without a pointer, such as
    those that ``ratchet run`` starts, are not found. Empty without a directory of pointers that ``_is_own``."""
    directory = pointers_directory()
    if not _is_own(directory):
        return []
    return sorted(Path(pointer.home) for _, pointer in _read_pointers(directory) if _is_running(pointer))


def killed_services() -> list[Path]:
    """Return the run directories, sorted, of this user's services that ended without cleaning up: their pointer and their
    ``service.json`` still exist. The next service of this user that creates a pointer deletes theirs (``create_pointer``)."""
    directory = pointers_directory()
    if not _is_own(directory):
        return []
    left = [Path(pointer.home) for _, pointer in _read_pointers(directory) if not _is_running(pointer)]
    return sorted(home for home in left if HomePaths(home).service_file.exists())


def _is_running(pointer: ServicePointer) -> bool:
    """True if the process that the pointer names is running."""
    return start_time(pointer.pid) == pointer.start_time


def _read_pointers(directory: Path) -> Iterator[tuple[Path, ServicePointer]]:
    """Yield path and content of every pointer in the directory that can be read and parsed, also if its service has ended. Other
    files are skipped; nothing is yielded if the directory is missing. The caller checks who owns it (``_is_own``)."""
    for path in directory.glob("*.json"):
        with suppress(OSError, ValidationError):
            yield path, ServicePointer.model_validate_json(path.read_bytes())


def _is_own(directory: Path) -> bool:
    """True if the path is a directory (not a link to one) that this user owns and no other user may write to."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
