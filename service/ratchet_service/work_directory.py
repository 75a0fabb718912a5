"""A job's working directory, read name by name below a directory descriptor, so that no symbolic link is followed anywhere.

User code decides what lies there: links, FIFOs, devices, trees without an end, names that are no text. Nothing here waits for one
of them, and whatever is not read is named by the code of the refusal. Call it within ``file_owner.as_owner``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratchet_contract import code_tree
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import JobPaths
from ratchet_service.file_owner import MOST_NAMES

MOST_LEVELS: Final = 64
"""Directories in one another; each holds a descriptor while what is in it is read."""
_MOST_PATH: Final = 4096  # bytes
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK: Final = 1 << 20
_CHANGED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})  # what a look has found is not there any more


@dataclass(frozen=True)
class Found:
    """One name. ``path``: below the working directory, undecodable bytes as surrogates; ``folder``: descriptor of the directory
    that holds it, open while the walk stands there. ``refused``: why its content is not given (the code of a problem)."""

    path: str
    folder: int
    stat: os.stat_result
    refused: str | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.stat.st_mode)

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.stat.st_mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.stat.st_mode)


def parts_of(path: str) -> tuple[str, ...]:
    """The names in a path below the working directory; none for its whole. Raises ``Refused`` (``unsafe-path``, ``too-deep``)."""
    parts = tuple(path.rstrip("/").split("/")) if path.rstrip("/") else ()
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise Refused(
            f"{path[:200]!r} is not a path below the working directory: name it from there, without . and .., like runs/best.pt",
            code="unsafe-path",
        )
    if len(parts) > MOST_LEVELS or len(os.fsencode(path)) > _MOST_PATH:
        raise Refused(f"more than {MOST_LEVELS} directories in one another are not read", code="too-deep")
    return parts


@contextmanager
def opened(job: JobPaths, parts: tuple[str, ...] = ()) -> Iterator[int]:
    """The descriptor of the working directory, or of the directory ``parts`` below it.

    Raises ``NotFound`` (``file-not-found``), ``Refused`` (``symbolic-link``, ``file-unreadable``).
    """
    here = _folder(str(job.root), None, job.root.name)
    try:
        for i, name in enumerate((job.work.name, *parts)):
            inner = _folder(name, here, "/".join(parts[:i]) or job.work.name)
            os.close(here)
            here = inner
        yield here
    finally:
        os.close(here)


def _folder(name: str, within: int | None, path: str) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=within)
    except OSError as error:
        raise _not_opened(name, within, path, error) from None


def open_file(name: str, folder: int, path: str) -> int:
    """A descriptor to read a regular file by. What it is is known before it is opened: a device may act on being opened.

    Raises ``NotFound`` (``file-not-found``), ``Refused`` (``symbolic-link``, ``special-file``, ``is-directory``,
    ``file-unreadable``).
    """
    try:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise _not_opened(name, folder, path, error) from None
    try:
        mode = os.fstat(handle).st_mode
        refused = refusal(mode)
        if stat.S_ISDIR(mode):
            raise Refused(
                f"{path!r} is a directory: list it, or fetch it as an archive (`ratchet cp`)", code="is-directory"
            )
        if refused is not None:
            raise Refused(_WORDS[refused].format(path=path), code=refused)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _not_opened(name, folder, path, error) from None
    finally:
        os.close(handle)


_WORDS: Final = {
    "symbolic-link": "{path!r} is a symbolic link, and none is followed: name the file that it leads to",
    "special-file": "{path!r} is a FIFO, a socket or a device: it has no content to fetch",
    "file-unreadable": "{path!r} may not be read by the service: the job's code has kept its rights to another user",
    "too-deep": "{path!r} lies deeper than is read: name a directory above it, and fetch that from the machine itself",
}


def refusal(mode: int) -> str | None:
    """Why what has that mode is not read, or None: it is a regular file or a directory."""
    if stat.S_ISLNK(mode):
        return "symbolic-link"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "special-file"


def _not_opened(name: str, folder: int | None, path: str, error: OSError) -> Exception:
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refused(_WORDS["file-unreadable"].format(path=path), code="file-unreadable")
    if error.errno not in _CHANGED and error.errno != errno.ENAMETOOLONG:
        return error
    try:
        linked = stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        linked = False
    if linked:
        return Refused(_WORDS["symbolic-link"].format(path=path), code="symbolic-link")
    return NotFound(f"there is no file {path!r} in the job's working directory", code="file-not-found")


def look(name: str, folder: int, path: str) -> Found:
    """What ``name`` is now. Raises ``NotFound`` (``file-not-found``)."""
    try:
        seen = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        raise _not_opened(name, folder, path, error) from None
    refused = refusal(seen.st_mode)
    if refused is None and stat.S_ISREG(seen.st_mode) and not seen.st_mode & stat.S_IROTH:
        try:
            os.close(open_file(name, folder, path))
        except (NotFound, Refused) as error:
            refused = error.code
    return Found(path, folder, seen, refused)


def walk(
    folder: int, prefix: tuple[str, ...] = (), after: tuple[str, ...] = (), *, deep: bool = True
) -> Iterator[Found]:
    """What lies below ``folder``, the directory ``prefix``: each directory before what is in it, names in the order of their
    bytes, from behind the path ``after`` (below ``folder``) on. ``deep``: not only the directory's own names. What vanishes
    meanwhile is passed over. Raises ``Refused`` (``too-many-files``) for a directory with more names than are read."""
    for name in _names(folder, prefix):
        passed = after[:1] == (name,)
        if after and not passed and os.fsencode(name) < os.fsencode(after[0]):
            continue
        parts = (*prefix, name)
        try:
            found = look(name, folder, "/".join(parts))
        except NotFound:
            continue
        inner = None
        try:
            if deep and found.is_folder:
                inner, found = _entered(found, parts)
            if not passed:
                yield found
            if inner is not None:
                yield from walk(inner, parts, after[1:] if passed else ())
        finally:
            if inner is not None:
                os.close(inner)


def _entered(found: Found, parts: tuple[str, ...]) -> tuple[int | None, Found]:
    if len(parts) >= MOST_LEVELS:
        return None, Found(found.path, found.folder, found.stat, "too-deep")
    try:
        return os.open(found.name, _FOLDER, dir_fd=found.folder), found
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, *_CHANGED):
            raise
        return None, Found(found.path, found.folder, found.stat, "file-unreadable")


def _names(folder: int, prefix: tuple[str, ...]) -> list[str]:
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MOST_NAMES:
                raise Refused(
                    f"the directory {'/'.join(prefix) or '.'!r} has more than {MOST_NAMES} names: fetch what is in it by the "
                    "names that its code gave, or from the machine itself",
                    code="too-many-files",
                )
    return sorted(names, key=os.fsencode)


class CodeCopy:
    """The snapshot of code that a working directory began as a copy of (``ratchet_worker.workdir``): what of it is there
    unchanged? ``most``: bytes that are compared; what is beyond them counts as changed. ``folder`` None, or not there: nothing is
    known of any."""

    def __init__(self, folder: Path | None, most: int) -> None:
        there = folder is not None and folder.is_dir()
        entries = code_tree.entries(folder, code_tree.UNLIMITED) if folder is not None and there else []
        self.entries = {entry.path: entry for entry in entries}
        self.folders = {str(parent) for path in self.entries for parent in Path(path).parents} - {"."}
        self._left = most

    def has(self, found: Found) -> bool:
        """Is it as the snapshot brought it there: kind, bytes, and whether it can be executed?"""
        if found.is_folder:
            return found.path in self.folders
        entry = self.entries.get(found.path)
        if entry is None:
            return False
        try:
            if found.is_link:
                return entry.link is not None and os.readlink(found.name, dir_fd=found.folder) == entry.link
            seen = found.stat
            if not found.is_file or entry.link is not None or seen.st_size != entry.size:
                return False
            if bool(seen.st_mode & 0o111) != entry.executable or seen.st_size > self._left:
                return False
            self._left -= seen.st_size
            fd = open_file(found.name, found.folder, found.path)
            with os.fdopen(fd, "rb") as own, entry.source.open("rb") as code:
                while (block := own.read(_BLOCK)) == code.read(_BLOCK):
                    if not block:
                        return True
        except (OSError, NotFound, Refused):
            pass  # it cannot be told: it counts as the job's own
        return False
