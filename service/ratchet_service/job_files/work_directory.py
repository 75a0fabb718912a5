"""Reads a job's working directory name by name, relative to a directory descriptor, so that no symbolic link is followed. User
code decides what is there, such as FIFOs, devices or endless trees. For use within ``file_access.as_owner``."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratchet_contract.code import tree
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import JobPaths
from ratchet_service.isolation.file_access import MAX_NAMES

MAX_LEVELS: Final = 64
"""Maximum depth of directories; each holds a descriptor while its content is read."""
_MAX_PATH_BYTES: Final = 4096  # bytes
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK: Final = 1 << 20
_VANISHED_ERRNOS: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
)  # an entry that was seen no longer exists


@dataclass(frozen=True)
class DirEntry:
    """One directory entry. ``path``: relative to the working directory; ``folder_fd``: descriptor of its directory,
    open only until the next entry is requested. ``refused``: code that says why the content is not read, if known."""

    path: str
    folder_fd: int
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


def split_path(path: str) -> tuple[str, ...]:
    """Split a path relative to the working directory into names; empty for the directory itself. Raises ``Refused``
    (``unsafe-path`` or ``too-deep``)."""
    parts = tuple(path.rstrip("/").split("/")) if path.rstrip("/") else ()
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise Refused(
            f"{path[:200]!r} is not a path below the working directory: name it from there, without . and .., like runs/best.pt",
            code="unsafe-path",
        )
    if len(parts) > MAX_LEVELS or len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise Refused(f"more than {MAX_LEVELS} nested directories are not read", code="too-deep")
    return parts


@contextmanager
def open_folder(job: JobPaths, parts: tuple[str, ...] = ()) -> Iterator[int]:
    """Yield a descriptor of the working directory, or of the directory ``parts`` below it, for the block. Raises ``NotFound``,
    ``Refused`` and, for other errors of the system, ``OSError``."""
    here = _open_folder(str(job.root), None, job.root.name)
    try:
        for i, name in enumerate((job.work_dir.name, *parts)):
            inner = _open_folder(name, here, "/".join(parts[:i]) or job.work_dir.name)
            os.close(here)
            here = inner
        yield here
    finally:
        os.close(here)


def _open_folder(name: str, folder_fd: int | None, path: str) -> int:
    """Open a directory, relative to ``folder_fd`` (None: an absolute path), and return its descriptor. ``path``: for messages.
    Raises as ``open_folder``."""
    try:
        return os.open(name, _FOLDER_FLAGS, dir_fd=folder_fd)
    except OSError as error:
        raise _open_error(name, folder_fd, path, error) from None


def open_file(name: str, folder_fd: int, path: str) -> int:
    """Return a descriptor to read a regular file; the caller closes it. ``path``: for messages. Raises as ``open_folder``,
    and ``Refused`` for anything but a regular file."""
    try:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError as error:
        raise _open_error(name, folder_fd, path, error) from None
    try:
        mode = os.fstat(handle).st_mode
        refused = refusal(mode)
        if stat.S_ISDIR(mode):
            raise Refused(
                f"{path!r} is a directory: list it, or fetch it as an archive (`ratchet cp`)", code="is-directory"
            )
        if refused is not None:
            raise Refused(_REFUSAL_TEXTS[refused].format(path=path), code=refused)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _open_error(name, folder_fd, path, error) from None
    finally:
        os.close(handle)


_REFUSAL_TEXTS: Final = {
    "symbolic-link": "{path!r} is a symbolic link, which is not followed: name its target",
    "special-file": "{path!r} is a FIFO, a socket or a device: it has no content to fetch",
    "file-unreadable": "the service may not read {path!r}: the job's code restricted its permissions to another user",
    "too-deep": "{path!r} is nested too deeply to be read: fetch a directory above it from the machine itself",
}


def refusal(mode: int) -> str | None:
    """Return the code that says why such a file (``st_mode``) is not read; None for a regular file or a directory."""
    if stat.S_ISLNK(mode):
        return "symbolic-link"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "special-file"


def _open_error(name: str, folder_fd: int | None, path: str, error: OSError) -> Exception:
    """Return (not raise) the error for a name that could not be opened: ``Refused``, ``NotFound``, or else ``error`` itself."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refused(_REFUSAL_TEXTS["file-unreadable"].format(path=path), code="file-unreadable")
    if error.errno not in _VANISHED_ERRNOS and error.errno != errno.ENAMETOOLONG:
        return error
    try:
        linked = stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)
    except OSError:
        linked = False
    if linked:
        return Refused(_REFUSAL_TEXTS["symbolic-link"].format(path=path), code="symbolic-link")
    return NotFound(f"there is no file {path!r} in the job's working directory", code="file-not-found")


def stat_entry(name: str, folder_fd: int, path: str) -> DirEntry:
    """Return the entry ``name`` of the directory ``folder_fd``; ``refused`` is set for a link, a special file, or a file that is
    found unreadable. Raises as ``open_folder``."""
    try:
        seen = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except OSError as error:
        raise _open_error(name, folder_fd, path, error) from None
    refused = refusal(seen.st_mode)
    if refused is None and stat.S_ISREG(seen.st_mode) and not seen.st_mode & stat.S_IROTH:
        try:
            os.close(open_file(name, folder_fd, path))
        except (NotFound, Refused) as error:
            refused = error.code
    return DirEntry(path, folder_fd, seen, refused)


def walk(
    folder_fd: int, prefix: tuple[str, ...] = (), after: tuple[str, ...] = (), *, recursive: bool = True
) -> Iterator[DirEntry]:
    """Yield the entries below the directory ``folder_fd`` in byte order of their names, each directory before its content. Use an
    entry's ``folder_fd`` before you request the next entry, since that may close it. ``prefix``: the path of the directory
    ``folder_fd``. ``after``: only entries after this path, relative to the directory ``folder_fd``. Raises ``Refused`` and
    ``OSError``."""
    for name in _names(folder_fd, prefix):
        passed = after[:1] == (name,)
        if after and not passed and os.fsencode(name) < os.fsencode(after[0]):
            continue
        parts = (*prefix, name)
        try:
            found = stat_entry(name, folder_fd, "/".join(parts))
        except NotFound:
            continue
        inner = None
        try:
            if recursive and found.is_folder:
                inner, found = _enter_folder(found, parts)
            if not passed:
                yield found
            if inner is not None:
                yield from walk(inner, parts, after[1:] if passed else ())
        finally:
            if inner is not None:
                os.close(inner)


def _enter_folder(entry: DirEntry, parts: tuple[str, ...]) -> tuple[int | None, DirEntry]:
    """Open the subdirectory ``entry``, and return its descriptor and the entry; None and the entry with ``refused`` set if it is
    too deep or cannot be read. Raises ``OSError``."""
    if len(parts) >= MAX_LEVELS:
        return None, DirEntry(entry.path, entry.folder_fd, entry.stat, "too-deep")
    try:
        fd = os.open(entry.name, _FOLDER_FLAGS, dir_fd=entry.folder_fd)
        try:
            os.stat(".", dir_fd=fd)
        except OSError:
            os.close(fd)
            raise
        return fd, entry
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, *_VANISHED_ERRNOS):
            raise
        return None, DirEntry(entry.path, entry.folder_fd, entry.stat, "file-unreadable")


def _names(folder_fd: int, prefix: tuple[str, ...]) -> list[str]:
    """Return the names in the directory, in byte order. Raises ``Refused`` (``too-many-files``)."""
    names = []
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MAX_NAMES:
                raise Refused(
                    f"the directory {'/'.join(prefix) or '.'!r} has more than {MAX_NAMES} names: fetch its files one by one "
                    "by name, or from the machine itself",
                    code="too-many-files",
                )
    return sorted(names, key=os.fsencode)


class CodeCopy:
    """Compares the files of a working directory with ``folder``, the snapshot of the job's code. ``max_bytes``: most bytes to
    compare; files beyond that count as changed."""

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        there = folder is not None and folder.is_dir()
        entries = tree.list_entries(folder, tree.UNLIMITED) if folder is not None and there else []
        self.entries = {entry.path: entry for entry in entries}
        self.folders = {str(parent) for path in self.entries for parent in Path(path).parents} - {"."}
        self._bytes_left = max_bytes

    def is_unchanged(self, found: DirEntry) -> bool:
        """True if the entry is the same in the snapshot; for a directory, if the snapshot has it."""
        if found.is_folder:
            return found.path in self.folders
        entry = self.entries.get(found.path)
        if entry is None:
            return False
        try:
            if found.is_link:
                return entry.link is not None and os.readlink(found.name, dir_fd=found.folder_fd) == entry.link
            seen = found.stat
            if not found.is_file or entry.link is not None or seen.st_size != entry.size:
                return False
            if bool(seen.st_mode & 0o111) != entry.executable or seen.st_size > self._bytes_left:
                return False
            self._bytes_left -= seen.st_size
            fd = open_file(found.name, found.folder_fd, found.path)
            with os.fdopen(fd, "rb") as own, entry.source.open("rb") as code:
                while (block := own.read(_BLOCK)) == code.read(_BLOCK):
                    if not block:
                        return True
        except (OSError, NotFound, Refused):
            pass  # unknown: it counts as the job's own
        return False
