"""User code by content: copied once into ``<home>/code/<digest>`` at submission, so that every attempt runs the same files.

The digest is SHA-256 over the sorted relative paths with kind, permission bits and content. Editing the directory later
changes nothing for the job; submitting it again unchanged makes no second copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratchet_contract.code_tree import IGNORED_NAMES, IGNORED_SUFFIXES
from ratchet_contract.errors import FieldProblem, SpecError
from ratchet_service import disk

MAX_BYTES: Final = 512 * 2**20
MAX_FILES: Final = 20_000
MAX_PATH: Final = 1024
GRACE: Final = 600.0
_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class _Entry:
    path: str  # relative, with "/"
    source: Path
    mode: int
    link: str | None  # target of a symbolic link
    size: int = 0


@dataclass(frozen=True)
class Limits:
    """What one snapshot may be."""

    max_bytes: int = MAX_BYTES
    max_files: int = MAX_FILES


def inspect(path: str | Path, limits: Limits | None = None) -> None:
    """Check that ``path`` can be snapshotted, without copying. Raises ``SpecError`` at ``/code/path``."""
    _entries(Path(path), limits or Limits())


def snapshot(path: str | Path, code_root: Path, limits: Limits | None = None) -> str:
    """Copy the directory below ``code_root`` and return its digest. Raises ``SpecError`` at ``/code/path``.

    Safe against a crash (temporary directory, fsync, rename) and against itself (the loser of a race uses the winner's).
    The digest is taken from the copy, so files that change while they are copied give one consistent snapshot. Raises
    ``Refused`` (``disk-full``) when there is no room for it; nothing half copied stays.
    """
    entries = _entries(Path(path), limits or Limits())
    try:
        return _snapshot(entries, code_root)
    except OSError as error:
        if not disk.is_full(error, code_root):
            raise
        what = f"the code of {str(path)!r} cannot be copied there, and the job was not stored"
        raise disk.full(code_root, what, sum(entry.size for entry in entries)) from error


def snapshot_file(path: str | Path, code_root: Path) -> str:
    """One file, of any size, likewise: below ``code_root/<digest>`` under its own name. Raises ``SpecError`` at
    ``/start_from/path``, ``Refused`` (``disk-full``)."""
    source = Path(path)
    try:
        size = source.stat().st_size
        return _snapshot([_Entry(source.name, source, 0o644, None, size)], code_root)
    except SpecError as error:
        problems = [p.model_copy(update={"pointer": "/start_from/path"}) for p in error.errors]
        raise SpecError(f"/start_from/path: {problems[0].detail}", errors=problems) from None
    except OSError as error:
        if not disk.is_full(error, code_root):
            raise
        raise disk.full(code_root, f"{str(path)!r} cannot be copied there, and the job was not stored", size) from error


def _snapshot(entries: list[_Entry], code_root: Path) -> str:
    code_root.mkdir(parents=True, exist_ok=True)
    with _guard(code_root):
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=code_root))
        try:
            digest = _copy(entries, temporary)
            target = code_root / digest
            if not target.exists():
                temporary.chmod(0o755)  # a directory must be writable to be renamed
                temporary.rename(target)
                target.chmod(0o555)
                _fsync(code_root)
            os.utime(target)  # remove_unreferenced goes by this
            return digest
        finally:
            if temporary.exists():
                remove_tree(temporary)


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
    problem = FieldProblem(pointer="/code/path", code=code, detail=detail)
    return SpecError(f"/code/path: {detail}", errors=[problem])


def _entries(root: Path, limits: Limits) -> list[_Entry]:
    if not root.is_absolute():
        raise _refuse("relative-path", f"{str(root)!r} must be an absolute path on the service's machine")
    if not exists(root, directory=True):
        raise _refuse("not-a-directory", f"{str(root)!r} is not a directory on the service's machine")
    resolved = root.resolve()
    out: list[_Entry] = []
    total = 0
    for entry in _walk(resolved):
        out.append(entry)
        total += entry.size
        if len(os.fsencode(entry.path)) > MAX_PATH:
            raise _refuse(
                "too-deep", f"a path below {str(root)!r} is longer than {MAX_PATH} bytes: {entry.path[:60]}..."
            )
        if len(out) > limits.max_files or total > limits.max_bytes:
            raise _refuse(
                "too-large",
                f"{str(root)!r} has more than {limits.max_files} files or {limits.max_bytes >> 20} MiB: name the directory "
                "of the code alone, and keep data and environments elsewhere",
            )
    return sorted(out, key=lambda e: e.path)


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


def _walk(root: Path) -> Iterator[_Entry]:
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as scan:
                for child in scan:
                    if child.name in IGNORED_NAMES or child.name.endswith(IGNORED_SUFFIXES):
                        continue
                    if child.is_dir(follow_symlinks=False):
                        if not exists(Path(child.path, "pyvenv.cfg"), directory=False):  # else a virtual environment
                            folders.append(Path(child.path))
                    else:
                        yield _entry(child, root)
        except (OSError, RuntimeError) as error:  # RuntimeError: pathlib's word for links that lead in a circle
            raise _refuse("unreadable", f"cannot read {str(folder)[:300]!r}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return error.strerror or "" if isinstance(error, OSError) else "symbolic links in it lead in a circle"


def _entry(child: os.DirEntry[str], root: Path) -> _Entry:
    path = Path(child.path)
    if child.is_symlink():
        return _link(path, root)
    if not child.is_file():
        raise _refuse("special-file", f"{str(path)!r} is neither a file, a directory nor a symbolic link")
    found = child.stat()
    return _Entry(path.relative_to(root).as_posix(), path, stat.S_IMODE(found.st_mode), None, found.st_size)


def _link(path: Path, root: Path) -> _Entry:
    target = path.readlink()
    inside = (path.parent / target).resolve()
    if target.is_absolute() or not inside.is_relative_to(root):
        raise _refuse(
            "link-outside",
            f"the symbolic link {str(path)!r} points outside the directory: the snapshot would not hold it",
        )
    return _Entry(path.relative_to(root).as_posix(), path, 0o777, str(target))


def _copy(entries: list[_Entry], target: Path) -> str:
    """Copy and hash in one pass; files and directories end up read-only and synced."""
    digest = hashlib.sha256(b"ratchet-code-1\0")
    folders = {target}
    for entry in entries:
        place = target / entry.path
        place.parent.mkdir(parents=True, exist_ok=True)
        folders.update(p for p in place.parents if p.is_relative_to(target))
        kind = "link" if entry.link is not None else "file"
        digest.update(f"{kind}\0{entry.path}\0{entry.mode:o}\0".encode("utf-8", "surrogateescape"))
        if entry.link is not None:
            place.symlink_to(entry.link)
            digest.update(hashlib.sha256(os.fsencode(entry.link)).digest())
        else:
            digest.update(_copy_file(entry, place))
    for folder in sorted(folders, reverse=True):
        _fsync(folder)
        folder.chmod(0o555)
    return digest.hexdigest()


def _copy_file(entry: _Entry, place: Path) -> bytes:
    inner = hashlib.sha256()
    try:
        with entry.source.open("rb") as source, place.open("xb") as out:
            while chunk := source.read(_CHUNK):
                inner.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (PermissionError, FileNotFoundError) as error:
        raise _refuse("unreadable", f"cannot read {str(entry.source)!r}: {error.strerror}") from None
    place.chmod(entry.mode & 0o555 | 0o444)
    return inner.digest()


def _fsync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_tree(folder: Path) -> None:
    """Delete a directory whatever modes its directories have. Raises ``OSError``."""
    folder.chmod(0o755)
    for current, below, _ in os.walk(folder):
        for name in below:
            path = Path(current, name)
            if not path.is_symlink():
                path.chmod(0o755)
    shutil.rmtree(folder)
