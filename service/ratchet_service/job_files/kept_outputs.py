"""Keeps and removes the outputs of a deleted job, which stay in its working directory until their removal is requested."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.roles import Role
from ratchet_contract.api.views import DeleteResult
from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import HomePaths, JobPaths, is_job_id
from ratchet_service.db import audit
from ratchet_service.db.engine import Database
from ratchet_service.db.principal import Principal
from ratchet_service.isolation.file_access import as_owner, open_read
from ratchet_service.job_files.work_directory import CodeCopy, open_folder, stat_entry
from ratchet_store.filesystem.durable_io import remove_tree

_MAX_OWNER_BYTES: Final = 4096  # bytes of the file that names the owner


def keep(paths: JobPaths, owner: str, code: Path | None) -> bool:
    """Delete unchanged files of the job's code from the working directory. Return True if anything is left: the directory then
    stays, and a marker file in the job's directory names ``owner``. Called within ``as_owner``. ``code``: directory of the code
    snapshot, if there is one."""
    if not paths.work_dir.is_dir() or paths.work_dir.is_symlink():
        return False
    _remove_code(paths, code)
    with suppress(OSError):  # it is not empty
        paths.work_dir.rmdir()
        return False
    write_atomic(paths.kept_marker, json.dumps({"owner": owner}).encode(), durable=True, mode=0o600)
    return True


def _remove_code(paths: JobPaths, code: Path | None) -> None:
    """Delete the files of the working directory that are unchanged copies of files in the snapshot ``code``, and the snapshot's
    directories that are empty there afterwards. Errors of single files are ignored."""
    copy = CodeCopy(code, 2**63)
    for path in copy.entries:
        *folders, name = path.split("/")
        with suppress(OSError, NotFound, Refused), open_folder(paths, tuple(folders)) as folder:
            if copy.is_unchanged(stat_entry(name, folder, path)):
                os.unlink(name, dir_fd=folder)
    for path in sorted(copy.folders, reverse=True):
        *folders, name = path.split("/")
        with suppress(OSError, NotFound, Refused), open_folder(paths, tuple(folders)) as folder:
            os.rmdir(name, dir_fd=folder)  # succeeds only if it is empty


def read_owner(paths: JobPaths) -> str | None:
    """Return the owner of a job that was deleted without its outputs; None if there is no readable marker file."""
    try:
        with open_read(paths.kept_marker) as handle:
            content = json.loads(handle.read(_MAX_OWNER_BYTES))
        return str(content["owner"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def remove(database: Database, homes: HomePaths, job_id: str, caller: Principal) -> DeleteResult | None:
    """Delete the kept working directory of a deleted job, and return what stays of the job; None if none was kept. Raises
    ``Refused`` if ``caller`` may not do this."""
    paths = homes.job(job_id)
    whose = read_owner(paths) if is_job_id(job_id) else None
    if whose is None:
        return None
    if caller.role is not Role.ADMIN and caller.owner != whose:
        raise Refused(
            f"job {job_id} belonged to {whose}, and you are {caller.owner}: its owner or an admin may do this",
            code="not-allowed",
        )
    with database.write(caller) as session:  # first: no file is deleted without this row
        audit.record(session, AuditAction.DELETE_OUTPUTS, "job", job_id, whose, {})
    with as_owner(paths.root):
        if paths.work_dir.is_dir() and not paths.work_dir.is_symlink():
            remove_tree(paths.work_dir)
        paths.kept_marker.unlink(missing_ok=True)
    with suppress(OSError):  # it holds kept checkpoints, or is gone
        paths.root.rmdir()
    return DeleteResult(id=job_id, checkpoints=str(paths.checkpoints) if paths.checkpoints.is_dir() else None)
