"""Snapshots of user code in ``<home>/code/<digest>``, so that later changes of the user's directory affect no attempt. Uploaded
code and files to start from are there, too."""

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

from ratchet_contract.atomic_write import fsync_path
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
from ratchet_store.filesystem.durable_io import remove_tree

GRACE: Final = 600.0
"""Seconds that code which no job names is kept after it was stored or used."""
_CHUNK: Final = 1 << 20


def inspect(
    path: str | Path, include: Sequence[str] = (), limits: Limits | None = None, allowed: Allowed = allow_all
) -> Choice:
    """Return what a snapshot of ``path`` would contain and leave out. ``include``: ``code.include`` of the spec; ``allowed``:
    returns whether a path may be read. Raise ``SpecError``."""
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
    """Copy the part of ``path`` that ``inspect`` chooses to ``code_root/<digest>``, durably, and return the digest. An
    existing copy is not replaced. Raise ``SpecError``, ``Refused`` if the disk is full, or ``OSError``."""
    found = inspect(path, include, limits, allowed).entries
    try:
        return _store_snapshot(found, code_root, allowed)
    except OSError as error:
        if not disk_space.is_disk_full_error(error, code_root):
            raise
        what = f"the code of {str(path)!r} cannot be copied there, and the job was not stored"
        raise disk_space.disk_full_error(code_root, what, sum(entry.size for entry in found)) from error


def snapshot_file(path: str | Path, code_root: Path, *, allowed: Allowed = allow_all) -> str:
    """Copy one file to ``code_root/<digest>/``, and return the digest. Raise ``SpecError``, ``Refused`` if the disk is full,
    or ``OSError``."""
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
    """Copy ``entries`` to ``code_root/<digest>`` while holding the lock, and return the digest. An existing copy is not
    replaced."""
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
                fsync_path(code_root)
            os.utime(target)  # remove_unreferenced reads this time
            return made
        finally:
            if temporary.exists():
                remove_tree(temporary)


def store_upload(archive: IO[bytes], code_digest: str, code_root: Path, limits: Limits | None = None) -> bool:
    """Unpack an uploaded archive to ``code_root/<code_digest>``, completely or not at all, and return True. Return False if
    this directory existed already. Raise ``BadArchive`` or ``OSError``."""
    with _exclusive_lock(code_root):
        new = not (code_root / code_digest).is_dir()
        if new:
            unpack(archive, code_digest, code_root / code_digest, limits=limits or Limits())
        os.utime(code_root / code_digest)
        return new


def keep_alive(code_digest: str, code_root: Path) -> bool:
    """Keep the code ``code_digest`` for another ``GRACE`` seconds, and return True; False if there is no such code."""
    if not (code_root / code_digest).is_dir():
        return False
    with _exclusive_lock(code_root):
        there = (code_root / code_digest).is_dir()
        if there:
            os.utime(code_root / code_digest)
        return there


def not_uploaded_problem(code_digest: str) -> FieldProblem:
    """Return the problem for a spec that names uploaded code by a digest which the service does not have."""
    text = (
        f"the service has no code with the digest {code_digest[:16]}...: upload the directory first, as `ratchet submit FILE "
        f"--upload` does; code that no job uses is kept for {GRACE / 60:g} minutes"
    )
    return FieldProblem(pointer="/code/digest", code="code-not-uploaded", detail=text)


def remove_unreferenced(code_root: Path, referenced: Callable[[], set[str]], grace: float = GRACE) -> list[str]:
    """Delete the directories that ``referenced`` does not name and that were unused for ``grace`` seconds, and return their
    names."""
    if not _expired_entries(code_root, grace):
        return []
    removed = []
    with _exclusive_lock(code_root):
        # under the lock; the grace is for submissions, whose snapshot exists before their job's row
        named = referenced()
        for entry in _expired_entries(code_root, grace):
            if entry.name not in named:
                remove_tree(entry)
                removed.append(entry.name)
    return removed


def _expired_entries(code_root: Path, grace: float) -> list[Path]:
    """Return the directories below ``code_root`` that were not stored or used in the last ``grace`` seconds, sorted by name."""
    entries = sorted(code_root.iterdir()) if code_root.is_dir() else []
    return [e for e in entries if e.is_dir() and time.time() - e.stat().st_mtime >= grace]


@contextmanager
def _exclusive_lock(code_root: Path) -> Iterator[None]:
    """Hold the lock of ``code_root`` within the block, against other threads and processes; waits for it. The directory must
    exist."""
    with (code_root / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _code_error(code: str, detail: str) -> SpecError:
    """Return a ``SpecError`` at ``/code/include`` for the code ``include-not-found``, at ``/code/path`` for others."""
    pointer = "/code/include" if code == "include-not-found" else "/code/path"
    return SpecError(f"{pointer}: {detail}", errors=[FieldProblem(pointer=pointer, code=code, detail=detail)])


def exists(path: Path, *, directory: bool) -> bool:
    """Return True if ``path`` is a directory or, with ``directory`` False, a regular file. Links are followed. Return False if
    this cannot be determined."""
    try:
        return path.is_dir() if directory else path.is_file()
    except OSError:
        return False


def names_in(directory: str) -> list[str]:
    """Return the sorted names in a directory, without those that a snapshot always ignores; empty if it cannot be read."""
    try:
        found = sorted(entry.name for entry in Path(directory).iterdir())
    except OSError:
        return []
    return [name for name in found if name not in IGNORED_NAMES and not name.endswith(IGNORED_SUFFIXES)]


def _copy(entries: list[Entry], target: Path, allowed: Allowed) -> str:
    """Copy ``entries`` below ``target``, durable and read-only, and return the digest of the copy. Raise ``SpecError`` or
    ``OSError``."""
    folders = {target}

    def target_path(entry: Entry) -> Path:
        """Return the path of the copy of ``entry``, after creating its directory."""
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
        fsync_path(folder)
        folder.chmod(0o555)
    return made


def _copy_file(entry: Entry, place: Path, allowed: Allowed) -> bytes:
    """Copy one file to ``place`` and return the SHA-256 digest of its content. Raise ``SpecError`` or ``OSError``."""
    inner = hashlib.sha256()
    try:
        fd = os.open(entry.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _code_error("unreadable", f"cannot read {str(entry.source)!r}: {error.strerror}") from None
    try:
        _check_opened(allowed, fd, entry)
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # no longer a regular file
            raise _code_error("unreadable", f"cannot read {str(entry.source)!r}: it is not a regular file")
        with os.fdopen(fd, "rb", closefd=False) as file, place.open("xb") as out:
            while chunk := file.read(_CHUNK):
                inner.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    finally:
        os.close(fd)
    place.chmod(entry.mode)
    return inner.digest()


def _recheck_link(entry: Entry, allowed: Allowed) -> None:
    """Raise ``SpecError`` if the directory of the link ``entry`` is no longer allowed or cannot be opened."""
    try:
        folder = os.open(entry.source.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _code_error("unreadable", f"cannot read {str(entry.source)!r}: {error.strerror}") from None
    try:
        _check_opened(allowed, folder, entry)
    finally:
        os.close(folder)


def _check_opened(allowed: Allowed, fd: int, entry: Entry) -> None:
    """Raise ``SpecError`` if the file or directory that is open as ``fd`` is not allowed."""
    # not the path of ``entry``: a link may have been put into it since it was checked
    real = Path(f"/proc/self/fd/{fd}").readlink()
    if not allowed(real):
        text = (
            f"{str(entry.source)!r} now points to another place than when it was checked, and that place is not allowed "
            "(--code-root)"
        )
        raise _code_error("path-not-allowed", text)
