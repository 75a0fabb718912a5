"""What a deleted job left in its working directory: it stays in the job's directory until its removal is asked for."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from ratchet_contract.access import Role
from ratchet_contract.api import DeleteResult
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import HomePaths, JobPaths, is_job_id
from ratchet_service.file_owner import as_owner, open_read, replace_file
from ratchet_service.tokens import Principal
from ratchet_service.work_directory import CodeCopy, look, opened
from ratchet_store.files import fsync_dir, remove_tree

_MOST: Final = 4096  # bytes of the file that tells the owner


def keep(paths: JobPaths, owner: str, code: Path | None) -> bool:
    """Before the rest of a job's directory goes: take what the code brought there, and nobody has changed, out of its working
    directory, and record whose job it was. Is anything left? Call it within ``as_owner``; again where a crash cut it short."""
    if not paths.work.is_dir() or paths.work.is_symlink():
        return False
    _remove_code(paths, code)
    with suppress(OSError):  # it holds something
        paths.work.rmdir()
        return False
    replace_file(paths.kept_file, json.dumps({"owner": owner}))
    fsync_dir(paths.root)
    return True


def _remove_code(paths: JobPaths, code: Path | None) -> None:
    copy = CodeCopy(code, 2**63)
    for path in copy.entries:
        *folders, name = path.split("/")
        with suppress(OSError, NotFound, Refused), opened(paths, tuple(folders)) as folder:
            if copy.has(look(name, folder, path)):
                os.unlink(name, dir_fd=folder)
    for path in sorted(copy.folders, reverse=True):
        *folders, name = path.split("/")
        with suppress(OSError, NotFound, Refused), opened(paths, tuple(folders)) as folder:
            os.rmdir(name, dir_fd=folder)  # where nothing else is in it


def owner(paths: JobPaths) -> str | None:
    """Whose the job was; None where none was deleted without its outputs."""
    try:
        with open_read(paths.kept_file) as handle:
            told = json.loads(handle.read(_MOST))
        return str(told["owner"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def remove(homes: HomePaths, job_id: str, caller: Principal) -> DeleteResult | None:
    """Remove the outputs of a job that was deleted before; None where there are none. Raises ``Refused`` (``not-allowed``) for
    somebody else's."""
    paths = homes.job(job_id)
    whose = owner(paths) if is_job_id(job_id) else None
    if whose is None:
        return None
    if caller.role is not Role.ADMIN and caller.owner != whose:
        raise Refused(
            f"job {job_id} belonged to {whose}, and you are {caller.owner}: its owner or an admin may do this",
            code="not-allowed",
        )
    with as_owner(paths.root):
        if paths.work.is_dir() and not paths.work.is_symlink():
            remove_tree(paths.work)
        paths.kept_file.unlink(missing_ok=True)
    with suppress(OSError):  # kept checkpoints are in it; or it has gone
        paths.root.rmdir()
    return DeleteResult(id=job_id, checkpoints=str(paths.checkpoints) if paths.checkpoints.is_dir() else None)
