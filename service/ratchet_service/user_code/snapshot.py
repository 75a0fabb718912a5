"""Snapshots of user code, named by their content: copied once into ``<home>/code/<digest>`` at submission, so that every attempt
runs the same files.

The digest is that of ``ratchet_contract.code.tree``. Editing the directory later changes nothing for the job; submitting it again
unchanged makes no second copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from ratchet_contract.code.archive import unpack
from ratchet_contract.code.choice import Allowed, Choice, allow_all, choose
from ratchet_contract.code.tree import (
    IGNORED_NAMES,
    IGNORED_SUFFIXES,
    Entry,
    Limits,
    TreeError,
    file_entry,
    tree_digest,
)
from ratchet_contract.errors import FieldProblem, SpecError
from ratchet_service.observability import disk_space
from ratchet_store.filesystem.durable_io import fsync_dir, remove_tree

GRACE: Final = 600.0
_CHUNK: Final = 1 << 20


def inspect(
    path: str | Path, include: Sequence[str] = (), limits: Limits | None = None, allowed: Allowed = allow_all
) -> Choice:
    """Return what a snapshot of ``path`` would contain, without copying. Raises ``SpecError`` at ``/code/path`` or
    ``/code/include``."""
    root = Path(path)
    if not root.is_absolute():
        raise _code_error("relative-path", f"{str(root)!r} must be an absolute path on the service's machine")
    if not exists(root, directory=True):
        raise _code_error("not-a-directory", f"{str(root)!r} is not a directory on the service's machine")
    try:
        return choose(root, include, limits or Limits(), allowed)
    except TreeError as error:
        raise _code_error(error.code, error.detail) from None


def snapshot(
    path: str | Path,
    code_root: Path,
    limits: Limits | None = None,
    *,
    include: Sequence[str] = (),
    allowed: Allowed = allow_all,
) -> str:
    """Copy the directory into ``code_root``, without what its ignore files name, and return the copy's digest. Raises what
    ``inspect`` raises.

    Safe against crashes (temporary directory, fsync, rename) and concurrent calls (the loser of a race uses the winner's copy).
    The digest is computed from the copy, so files that change while they are copied give one consistent snapshot. Raises
    ``Refused`` (``disk-full``) when there is not enough free space; no partial copy stays.
    """
    found = inspect(path, include, limits, allowed).entries
    try:
        return _store_snapshot(found, code_root, allowed)
    except OSError as error:
        if not disk_space.is_disk_full_error(error, code_root):
            raise
        what = f"the code of {str(path)!r} cannot be copied there, and the job was not stored"
        raise disk_space.disk_full_error(code_root, what, sum(entry.size for entry in found)) from error


def snapshot_file(path: str | Path, code_root: Path, *, allowed: Allowed = allow_all) -> str:
    """Copy one file, of any size, in the same way: into ``code_root/<digest>`` under its own name. Raises ``SpecError`` at
    ``/start_from/path``, ``Refused`` (``disk-full``)."""
    source = Path(path)
    try:
        return _store_snapshot([file_entry(source)], code_root, allowed)
    except SpecError as error:
        problems = [p.model_copy(update={"pointer": "/start_from/path"}) for p in error.errors]
        raise SpecError(f"/start_from/path: {problems[0].detail}", errors=problems) from None
    except OSError as error:
        if not disk_space.is_disk_full_error(error, code_root):
            raise
        size = file_entry(source).size
        raise disk_space.disk_full_error(
            code_root, f"{str(path)!r} cannot be copied there, and the job was not stored", size
        ) from error


def _store_snapshot(entries: list[Entry], code_root: Path, allowed: Allowed) -> str:
    code_root.mkdir(parents=True, exist_ok=True)
    with _exclusive_lock(code_root):
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=code_root))
        try:
            made = _copy(entries, temporary, allowed)
            target = code_root / made
            if not target.exists():
                temporary.chmod(0o755)  # a directory must be writable to be renamed
                temporary.rename(target)
                target.chmod(0o555)
                fsync_dir(code_root)
            os.utime(target)  # remove_unreferenced reads this time
            return made
        finally:
            if temporary.exists():
                remove_tree(temporary)


def store_upload(archive: IO[bytes], code_digest: str, code_root: Path, limits: Limits | None = None) -> bool:
    """Store an uploaded directory, an archive under the digest ``code_digest``: completely or not at all. Return False if it
    existed already. Raises ``BadArchive``, ``OSError``."""
    with _exclusive_lock(code_root):
        new = not (code_root / code_digest).is_dir()
        if new:
            unpack(archive, code_digest, code_root / code_digest, limits=limits or Limits())
        os.utime(code_root / code_digest)
        return new


def keep_alive(code_digest: str, code_root: Path) -> bool:
    """True if there is a tree under the digest ``code_digest``. It then stays for another ``GRACE`` seconds, even if no job names
    it."""
    if not (code_root / code_digest).is_dir():
        return False
    with _exclusive_lock(code_root):
        there = (code_root / code_digest).is_dir()
        if there:
            os.utime(code_root / code_digest)
        return there


def not_uploaded_problem(code_digest: str) -> FieldProblem:
    """Return the problem of a spec that names code by a digest that is not here."""
    text = (
        f"the service has no code with the digest {code_digest[:16]}...: upload the directory first, as `ratchet submit FILE "
        f"--upload` does; code that no job uses is kept for {GRACE / 60:g} minutes"
    )
    return FieldProblem(pointer="/code/digest", code="code-not-uploaded", detail=text)


def remove_unreferenced(code_root: Path, referenced: Callable[[], set[str]], grace: float = GRACE) -> list[str]:
    """Delete snapshots that no job names, and partial copies that a crash left. Return what was removed.

    What was made or used again in the last ``grace`` seconds stays: a submission takes its snapshot before its job's row exists.
    ``referenced`` is called only if there are candidates.
    """
    if not _expired_entries(code_root, grace):
        return []
    removed = []
    with _exclusive_lock(code_root):
        named = referenced()
        for entry in _expired_entries(code_root, grace):
            if entry.name not in named:
                remove_tree(entry)
                removed.append(entry.name)
    return removed


def _expired_entries(code_root: Path, grace: float) -> list[Path]:
    entries = sorted(code_root.iterdir()) if code_root.is_dir() else []
    return [e for e in entries if e.is_dir() and time.time() - e.stat().st_mtime >= grace]


@contextmanager
def _exclusive_lock(code_root: Path) -> Iterator[None]:
    with (code_root / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _code_error(code: str, detail: str) -> SpecError:
    pointer = "/code/include" if code == "include-not-found" else "/code/path"
    return SpecError(f"{pointer}: {detail}", errors=[FieldProblem(pointer=pointer, code=code, detail=detail)])


def exists(path: Path, *, directory: bool) -> bool:
    """True if there is such a file or directory. A path that the system cannot even look up (too long, no permission) does not
    exist."""
    try:
        return path.is_dir() if directory else path.is_file()
    except OSError:
        return False


def names_in(directory: str) -> list[str]:
    """Return the names in a directory that a snapshot would take, for messages; none if it cannot be read."""
    try:
        found = sorted(entry.name for entry in Path(directory).iterdir())
    except OSError:
        return []
    return [name for name in found if name not in IGNORED_NAMES and not name.endswith(IGNORED_SUFFIXES)]


def _copy(entries: list[Entry], target: Path, allowed: Allowed) -> str:
    """Copy and hash in one pass; files and directories end up read-only and synced."""
    folders = {target}

    def target_path(entry: Entry) -> Path:
        place = target / entry.path
        place.parent.mkdir(parents=True, exist_ok=True)
        folders.update(p for p in place.parents if p.is_relative_to(target))
        return place

    for entry in entries:
        if entry.link is not None:
            _recheck_link(entry, allowed)
            target_path(entry).symlink_to(entry.link)
    made = tree_digest(entries, lambda entry: _copy_file(entry, target_path(entry), allowed))
    for folder in sorted(folders, reverse=True):
        fsync_dir(folder)
        folder.chmod(0o555)
    return made


def _copy_file(entry: Entry, place: Path, allowed: Allowed) -> bytes:
    inner = hashlib.sha256()
    try:
        fd = os.open(entry.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file, place.open("xb") as out:
            _check_opened(allowed, fd, entry)
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # no longer a regular file
                raise _code_error("unreadable", f"cannot read {str(entry.source)!r}: it is not a regular file")
            while chunk := file.read(_CHUNK):
                inner.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (PermissionError, FileNotFoundError) as error:
        raise _code_error("unreadable", f"cannot read {str(entry.source)!r}: {error.strerror}") from None
    place.chmod(entry.mode)
    return inner.digest()


def _recheck_link(entry: Entry, allowed: Allowed) -> None:
    """Check that the link is still where it was found. Only its text is copied."""
    try:
        folder = os.open(entry.source.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _code_error("unreadable", f"cannot read {str(entry.source)!r}: {error.strerror}") from None
    try:
        _check_opened(allowed, folder, entry)
    finally:
        os.close(folder)


def _check_opened(allowed: Allowed, fd: int, entry: Entry) -> None:
    """Check the file that was opened, not where the path leads by now: links may be put into it between a check and the copy."""
    real = Path(f"/proc/self/fd/{fd}").readlink()
    if not allowed(real):
        text = (
            f"{str(entry.source)!r} now points to another place than when it was checked, and that place is not allowed "
            "(--code-root)"
        )
        raise _code_error("path-not-allowed", text)
