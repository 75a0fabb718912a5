"""User code by content: copied once into ``<home>/code/<digest>`` at submission, so that every attempt runs the same files.

The digest is ``ratchet_contract.code_tree``'s. Editing the directory later changes nothing for the job; submitting it again
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

from ratchet_contract.code_archive import unpack
from ratchet_contract.code_choice import Allowed, Choice, anything, choose
from ratchet_contract.code_tree import (
    IGNORED_NAMES,
    IGNORED_SUFFIXES,
    Entry,
    Limits,
    TreeError,
    digest,
    file_entry,
)
from ratchet_contract.errors import FieldProblem, SpecError
from ratchet_service import disk
from ratchet_store.files import fsync_dir, remove_tree

GRACE: Final = 600.0
_CHUNK: Final = 1 << 20


def inspect(
    path: str | Path, include: Sequence[str] = (), limits: Limits | None = None, allowed: Allowed = anything
) -> Choice:
    """What a snapshot of ``path`` would have, without copying. Raises ``SpecError`` at ``/code/path`` or ``/code/include``."""
    root = Path(path)
    if not root.is_absolute():
        raise _refuse("relative-path", f"{str(root)!r} must be an absolute path on the service's machine")
    if not exists(root, directory=True):
        raise _refuse("not-a-directory", f"{str(root)!r} is not a directory on the service's machine")
    try:
        return choose(root, include, limits or Limits(), allowed)
    except TreeError as error:
        raise _refuse(error.code, error.detail) from None


def snapshot(
    path: str | Path,
    code_root: Path,
    limits: Limits | None = None,
    *,
    include: Sequence[str] = (),
    allowed: Allowed = anything,
) -> str:
    """Copy the directory below ``code_root``, but for what its ignore files name, and return the copy's digest. Raises what
    ``inspect`` raises.

    Safe against a crash (temporary directory, fsync, rename) and against itself (the loser of a race uses the winner's).
    The digest is taken from the copy, so files that change while they are copied give one consistent snapshot. Raises
    ``Refused`` (``disk-full``) when there is no room for it; nothing half copied stays.
    """
    found = inspect(path, include, limits, allowed).entries
    try:
        return _snapshot(found, code_root, allowed)
    except OSError as error:
        if not disk.is_full(error, code_root):
            raise
        what = f"the code of {str(path)!r} cannot be copied there, and the job was not stored"
        raise disk.full(code_root, what, sum(entry.size for entry in found)) from error


def snapshot_file(path: str | Path, code_root: Path, *, allowed: Allowed = anything) -> str:
    """One file, of any size, likewise: below ``code_root/<digest>`` under its own name. Raises ``SpecError`` at
    ``/start_from/path``, ``Refused`` (``disk-full``)."""
    source = Path(path)
    try:
        return _snapshot([file_entry(source)], code_root, allowed)
    except SpecError as error:
        problems = [p.model_copy(update={"pointer": "/start_from/path"}) for p in error.errors]
        raise SpecError(f"/start_from/path: {problems[0].detail}", errors=problems) from None
    except OSError as error:
        if not disk.is_full(error, code_root):
            raise
        size = file_entry(source).size
        raise disk.full(code_root, f"{str(path)!r} cannot be copied there, and the job was not stored", size) from error


def _snapshot(found: list[Entry], code_root: Path, allowed: Allowed) -> str:
    code_root.mkdir(parents=True, exist_ok=True)
    with _guard(code_root):
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=code_root))
        try:
            made = _copy(found, temporary, allowed)
            target = code_root / made
            if not target.exists():
                temporary.chmod(0o755)  # a directory must be writable to be renamed
                temporary.rename(target)
                target.chmod(0o555)
                fsync_dir(code_root)
            os.utime(target)  # remove_unreferenced goes by this
            return made
        finally:
            if temporary.exists():
                remove_tree(temporary)


def receive(sent: IO[bytes], made: str, code_root: Path, limits: Limits | None = None) -> bool:
    """A directory that somebody sent, an archive under the digest ``made``: there in whole or not at all. False: it was there
    already. Raises ``BadArchive``, ``OSError``."""
    with _guard(code_root):
        new = not (code_root / made).is_dir()
        if new:
            unpack(sent, made, code_root / made, limits=limits or Limits())
        os.utime(code_root / made)
        return new


def keep(made: str, code_root: Path) -> bool:
    """Is there a tree under the digest ``made``? If so, it stays for another ``GRACE`` seconds, whoever names it."""
    if not (code_root / made).is_dir():
        return False
    with _guard(code_root):
        there = (code_root / made).is_dir()
        if there:
            os.utime(code_root / made)
        return there


def not_uploaded(made: str) -> FieldProblem:
    """For a spec that names code by a digest that is not here."""
    text = (
        f"the service has no code with the digest {made[:16]}...: send the directory first, as `ratchet submit FILE --upload` "
        f"does; what no job names is kept for {GRACE / 60:g} minutes"
    )
    return FieldProblem(pointer="/code/digest", code="code-not-uploaded", detail=text)


def remove_unreferenced(code_root: Path, referenced: Callable[[], set[str]], grace: float = GRACE) -> list[str]:
    """Delete snapshots that no job names, and copies that a crash left half done. Returns what was removed.

    What was made or used again in the last ``grace`` seconds stays: a submission takes its snapshot before its job's row is
    there to name it. ``referenced`` is only asked when there is something to ask about.
    """
    if not _old(code_root, grace):
        return []
    removed = []
    with _guard(code_root):
        named = referenced()
        for entry in _old(code_root, grace):
            if entry.name not in named:
                remove_tree(entry)
                removed.append(entry.name)
    return removed


def _old(code_root: Path, grace: float) -> list[Path]:
    entries = sorted(code_root.iterdir()) if code_root.is_dir() else []
    return [e for e in entries if e.is_dir() and time.time() - e.stat().st_mtime >= grace]


@contextmanager
def _guard(code_root: Path) -> Iterator[None]:
    with (code_root / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _refuse(code: str, detail: str) -> SpecError:
    pointer = "/code/include" if code == "include-not-found" else "/code/path"
    return SpecError(f"{pointer}: {detail}", errors=[FieldProblem(pointer=pointer, code=code, detail=detail)])


def exists(path: Path, *, directory: bool) -> bool:
    """Is there such a file or directory? A path that the system cannot even look up (too long, no permission) is not there."""
    try:
        return path.is_dir() if directory else path.is_file()
    except OSError:
        return False


def names_in(directory: str) -> list[str]:
    """What a message tells of a directory: the names that a snapshot would take from it; none where it cannot be read."""
    try:
        found = sorted(entry.name for entry in Path(directory).iterdir())
    except OSError:
        return []
    return [name for name in found if name not in IGNORED_NAMES and not name.endswith(IGNORED_SUFFIXES)]


def _copy(found: list[Entry], target: Path, allowed: Allowed) -> str:
    """Copy and hash in one pass; files and directories end up read-only and synced."""
    folders = {target}

    def place_of(entry: Entry) -> Path:
        place = target / entry.path
        place.parent.mkdir(parents=True, exist_ok=True)
        folders.update(p for p in place.parents if p.is_relative_to(target))
        return place

    for entry in found:
        if entry.link is not None:
            _look_again(entry, allowed)
            place_of(entry).symlink_to(entry.link)
    made = digest(found, lambda entry: _copy_file(entry, place_of(entry), allowed))
    for folder in sorted(folders, reverse=True):
        fsync_dir(folder)
        folder.chmod(0o555)
    return made


def _copy_file(entry: Entry, place: Path, allowed: Allowed) -> bytes:
    inner = hashlib.sha256()
    try:
        fd = os.open(entry.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file, place.open("xb") as out:
            _must_be(allowed, fd, entry)
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # not any more
                raise _refuse("unreadable", f"cannot read {str(entry.source)!r}: it is no regular file")
            while chunk := file.read(_CHUNK):
                inner.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (PermissionError, FileNotFoundError) as error:
        raise _refuse("unreadable", f"cannot read {str(entry.source)!r}: {error.strerror}") from None
    place.chmod(entry.mode)
    return inner.digest()


def _look_again(entry: Entry, allowed: Allowed) -> None:
    """Is the link still where it was found? Its text alone is copied."""
    try:
        folder = os.open(entry.source.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refuse("unreadable", f"cannot read {str(entry.source)!r}: {error.strerror}") from None
    try:
        _must_be(allowed, folder, entry)
    finally:
        os.close(folder)


def _must_be(allowed: Allowed, fd: int, entry: Entry) -> None:
    """What was opened, not what the path leads to by now: links may be put into it between a check and the copy."""
    real = Path(f"/proc/self/fd/{fd}").readlink()
    if not allowed(real):
        text = (
            f"{str(entry.source)!r} leads to another place than when it was checked, which is not allowed (--code-root)"
        )
        raise _refuse("path-not-allowed", text)
