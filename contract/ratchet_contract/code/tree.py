"""Lists the files and links of a directory that count as the user's code, and computes their digest. The digest is the SHA-256
over the sorted relative paths, each with kind, executable bit and content. Some names, such as those of caches, never count."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratchet_contract.paths import RUN_MARK_NAME

IGNORED_NAMES: Final = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", ".ratchet", ".mypy_cache", ".pytest_cache"}
)
IGNORED_SUFFIXES: Final = (".pyc", ".pyo")
_EXCLUDING_MARKERS: Final = ("pyvenv.cfg", RUN_MARK_NAME)
MAX_BYTES: Final = 512 * 2**20
MAX_FILES: Final = 20_000
MAX_PATH: Final = 1024
DIGEST: Final = r"^[0-9a-f]{64}$"
_CHUNK: Final = 1 << 20


class TreeError(Exception):
    """The directory of code cannot be used as it is. ``code`` and ``detail``: as in a problem of the API."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


@dataclass(frozen=True)
class Entry:
    """A file or link of a tree. ``path``: relative to the tree. ``link``: a symbolic link's target; None: a file."""

    path: str
    source: Path
    executable: bool = False
    link: str | None = None
    size: int = 0

    @property
    def mode(self) -> int:
        """The permission bits of the file or link in a read-only copy."""
        return 0o777 if self.link is not None else 0o555 if self.executable else 0o444


@dataclass(frozen=True)
class Limits:
    """Maximum bytes and number of files of one directory of code."""

    max_bytes: int = MAX_BYTES
    max_files: int = MAX_FILES


UNLIMITED: Final = Limits(max_bytes=2**63, max_files=2**31)
"""For a copy, which was within the limits when it was made."""


def list_entries(root: Path, limits: Limits = Limits()) -> list[Entry]:
    """Return the entries below ``root`` that count as code, sorted by path. Raises ``TreeError``."""
    return within_limits(root, walk(root.resolve(), lambda path, is_dir: True), limits)


def within_limits(root: Path, candidates: Iterable[Entry], limits: Limits) -> list[Entry]:
    """Return ``candidates`` sorted by path. Raises ``TreeError`` beyond ``limits``, and for a path that is too long."""
    out: list[Entry] = []
    total = 0
    for entry in candidates:
        out.append(entry)
        total += entry.size
        if len(os.fsencode(entry.path)) > MAX_PATH:
            raise TreeError(
                "too-deep", f"a path below {str(root)!r} is longer than {MAX_PATH} bytes: {entry.path[:60]}..."
            )
        if len(out) > limits.max_files or total > limits.max_bytes:
            raise TreeError(
                "too-large",
                f"{str(root)!r} has more than {limits.max_files} files or {limits.max_bytes >> 20} MiB: name only the "
                "directory of the code, keep data and environments elsewhere, or name them in a .ratchetignore",
            )
    return sorted(out, key=lambda e: e.path)


def file_entry(path: Path) -> Entry:
    """Return the entry of ``path`` for a tree of only this file, under its own name and not executable."""
    return Entry(path.name, path, size=path.stat().st_size)


def tree_digest(entries: Iterable[Entry], content_digest: Callable[[Entry], bytes] | None = None) -> str:
    """Return the digest of ``entries``, which are sorted by path. ``content_digest``: returns a file's SHA-256; None: read the
    file."""
    out = hashlib.sha256(b"ratchet-code-1\0")
    for entry in entries:
        kind = "link" if entry.link is not None else "file"
        mode = 0o777 if entry.link is not None else 0o755 if entry.executable else 0o644
        out.update(f"{kind}\0{entry.path}\0{mode:o}\0".encode("utf-8", "surrogateescape"))
        if entry.link is not None:
            out.update(hashlib.sha256(os.fsencode(entry.link)).digest())
        else:
            out.update((content_digest or _content_digest)(entry))
    return out.hexdigest()


def script_digest(modules: Mapping[str, Path]) -> str:
    """Return the digest of a script's modules, computed as a tree digest with module names in place of paths. ``modules``: files
    by module name."""
    return tree_digest(Entry(name, path) for name, path in sorted(modules.items()))


def differing_paths(one: Iterable[Entry], other: Iterable[Entry]) -> list[str]:
    """Return the sorted paths of entries that only one tree has or that differ. Reads the files."""
    there, here = ({entry.path: tree_digest([entry]) for entry in tree} for tree in (one, other))
    return sorted(path for path in {*there, *here} if there.get(path) != here.get(path))


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, in chunks of one mebibyte. Raises ``OSError``."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _content_digest(entry: Entry) -> bytes:
    """Return the SHA-256 of a file's bytes."""
    inner = hashlib.sha256()
    for chunk in read_chunks(entry.source):
        inner.update(chunk)
    return inner.digest()


def walk(root: Path, is_included: Callable[[str, bool], bool]) -> Iterator[Entry]:
    """Yield the entries below ``root``, a real path, that count as code, unsorted. ``is_included(path, is_dir)``, with the path
    relative to ``root``: True to include the file or search the directory. Raises ``TreeError``."""
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as scan:
                for child in scan:
                    if child.name in IGNORED_NAMES or child.name.endswith(IGNORED_SUFFIXES):
                        continue
                    is_dir = child.is_dir(follow_symlinks=False)
                    if not is_included(Path(child.path).relative_to(root).as_posix(), is_dir):
                        continue
                    if is_dir:
                        if not any(Path(child.path, mark).is_file() for mark in _EXCLUDING_MARKERS):
                            folders.append(Path(child.path))
                    else:
                        yield _entry(child, root)
        except OSError as error:
            raise TreeError("unreadable", f"cannot read {str(folder)[:300]!r}: {error.strerror}") from None


def _entry(child: os.DirEntry[str], root: Path) -> Entry:
    """Return the entry of a file or link. Raises ``TreeError`` (``link-outside``, ``special-file``) and ``OSError``."""
    path = Path(child.path)
    name = path.relative_to(root).as_posix()
    if child.is_symlink():
        target = path.readlink()
        # realpath, since Path.resolve raises for a loop of links before Python 3.13, but not from then on
        if target.is_absolute() or not Path(os.path.realpath(path)).is_relative_to(root):
            raise TreeError(
                "link-outside",
                f"the symbolic link {str(path)!r} points outside the directory: the snapshot would not contain its target",
            )
        try:
            path.stat()
        except OSError as error:  # a link to a file that the job will create is kept
            if error.errno == errno.ELOOP:
                raise
        return Entry(name, path, link=str(target))
    if not child.is_file():
        raise TreeError("special-file", f"{str(path)!r} is neither a file, a directory nor a symbolic link")
    found = child.stat()
    return Entry(name, path, bool(found.st_mode & 0o111), size=found.st_size)
