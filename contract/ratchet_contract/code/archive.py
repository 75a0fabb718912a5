"""Writes a tree of code as a tar with reproducible bytes, and unpacks one from an untrusted sender."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from ratchet_contract.atomic_write import fsync_path
from ratchet_contract.code import tree
from ratchet_contract.code.tree import Entry, Limits, TreeError

MEDIA_TYPE: Final = "application/x-tar"
_BLOCK: Final = 256 * 1024
_LONG: Final = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MAX_LONG: Final = 4096 + tarfile.BLOCKSIZE
"""Bytes of a long name or link, which ``tarfile`` holds in memory; Linux has none longer than PATH_MAX."""
_PER_FILE: Final = 8192
"""Maximum number of bytes around the content of a file: its header, its padding, and a long name and a long link with their own
headers."""
_BAD_NAME_ERRNOS: Final = frozenset(
    {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP, errno.EINVAL}
)
"""Error numbers for names that no tree can have: the same one twice, a file in place of a directory, an empty link."""


class BadArchive(Exception):
    """The archive is not the one with the requested digest, or must not be unpacked."""


def write_archive(entries: list[Entry]) -> Iterator[bytes]:
    """Yield the bytes of a tar of ``entries``, which the caller has sorted by path. Raises ``OSError``, also if a file's size has
    changed."""
    for entry in entries:
        yield _header(entry)
        if entry.link is None:
            yield from _read_exactly(entry.source, entry.size)
            yield b"\0" * _padding(entry)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def archive_size(entries: list[Entry]) -> int:
    """Return the number of bytes that ``write_archive`` would yield; no file is read."""
    contents = sum(entry.size + _padding(entry) for entry in entries if entry.link is None)
    return contents + sum(len(_header(entry)) for entry in entries) + 2 * tarfile.BLOCKSIZE


def largest_archive(limits: Limits) -> int:
    """Return an upper bound, in bytes, of the archive of a tree within ``limits``."""
    return limits.max_bytes + limits.max_files * _PER_FILE + 2 * tarfile.BLOCKSIZE


def _header(entry: Entry) -> bytes:
    """Return the bytes of the tar header of one entry. They include further blocks if its path or link target is long."""
    info = tarfile.TarInfo(entry.path)
    info.mode, info.size = entry.mode, entry.size
    if entry.link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _padding(entry: Entry) -> int:
    """Return the number of NUL bytes after the content of an entry."""
    return -entry.size % tarfile.BLOCKSIZE


def _read_exactly(path: Path, size: int) -> Iterator[bytes]:
    """Yield the file's content. Raises ``OSError`` if it no longer has ``size`` bytes."""
    sent = 0
    for chunk in tree.read_chunks(path):
        sent += len(chunk)
        if sent > size:
            break
        yield chunk
    if sent != size:
        raise OSError(f"{os.fspath(path)!r} has changed: it had {size} bytes")


def unpack(archive: IO[bytes], digest: str, target: Path, *, one_file: bool = False, limits: Limits = Limits()) -> None:
    """Unpack the tar ``archive`` as the read-only directory ``target``, completely or not at all. If ``target`` already has
    files, it is not changed. ``one_file``: the archive has a single file, and ``limits`` do not apply. Raises ``BadArchive`` if
    the tree digest of the archive is not ``digest``, or if the archive is invalid or not allowed. Raises ``OSError`` if it cannot
    be written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".tmp-", dir=target.parent))
    try:
        found = _unpack_verified(archive, digest, made, one_file, limits)
        _make_read_only(made, found)
        try:
            made.rename(target)
        except OSError:
            # Another process may have unpacked it concurrently.
            if not target.is_dir():
                raise
        else:
            target.chmod(0o555)
            fsync_path(target.parent)
    finally:
        _remove_tree(made)


def _unpack_verified(archive: IO[bytes], digest: str, directory: Path, one_file: bool, limits: Limits) -> list[Entry]:
    """Unpack into ``directory`` and return its entries. Raises ``BadArchive`` if the archive is invalid or has another digest."""
    try:
        with tarfile.open(
            fileobj=archive, mode="r|", encoding="utf-8", errors="surrogateescape", tarinfo=_Member
        ) as tar:
            count = _extract(tar, directory, None if one_file else limits)
        found = [tree.file_entry(p) for p in directory.iterdir()] if one_file else tree.list_entries(directory, limits)
    except (tarfile.TarError, RecursionError) as error:  # RecursionError: too many nested headers
        raise BadArchive(f"it is not a valid archive: {error}") from None
    except TreeError as error:
        raise BadArchive(error.detail) from None
    except OSError as error:
        if error.errno not in _BAD_NAME_ERRNOS:
            raise
        raise BadArchive(f"it has names that the file system rejects: {error.strerror}") from None
    if len(found) != count:  # the digest does not cover such files, but an import would find them
        raise BadArchive("it has files that do not count as code, such as caches")
    got = tree.tree_digest(found)
    if got != digest:
        raise BadArchive(f"its digest is {got}, not {digest}")
    return found


class _Member(tarfile.TarInfo):
    """A tar member with a check of its header. The check is done before ``tarfile`` creates the file or reads a long name that
    follows the header."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        """Check the header, then process it as ``tarfile`` does. Raises ``BadArchive``."""
        if self.type in _LONG:
            if not 0 <= self.size <= _MAX_LONG:
                raise BadArchive(f"a name in it is longer than {tree.MAX_PATH} bytes")
        elif self.type not in (tarfile.REGTYPE, tarfile.SYMTYPE) or self.size < 0:
            raise BadArchive(f"{self.name!r} in it is neither a file nor a symbolic link")
        return super()._proc_member(tar)  # type: ignore[misc]  # tarfile's own place for this, unknown to typeshed


def _extract(tar: tarfile.TarFile, target: Path, limits: Limits | None) -> int:
    """Extract all files, then all links, and return their number. ``limits`` None: no limits. Raises ``BadArchive``,
    ``tarfile.TarError`` and ``OSError``."""
    links: list[tuple[Path, str]] = []
    count = total = 0
    for member in tar:
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in member.name:
            raise BadArchive(f"it has the name {member.name!r}")
        count, total = count + 1, total + member.size
        if limits is not None and (count > limits.max_files or total > limits.max_bytes):
            raise BadArchive(f"it has more than {limits.max_files} files or {limits.max_bytes >> 20} MiB")
        if len(os.fsencode(member.name)) > tree.MAX_PATH:
            raise BadArchive(f"a name in it is longer than {tree.MAX_PATH} bytes")
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if member.type == tarfile.SYMTYPE:
            links.append((place, member.linkname))
        else:
            _write(tar, member, place)
    # Links come last, so that no file is written through a link.
    for place, linked in links:
        place.symlink_to(linked)
    return count


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write one regular file of the tar to the new file ``target`` and sync it."""
    source = tar.extractfile(member)
    assert source is not None
    with target.open("xb") as out:
        while block := source.read(_BLOCK):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    target.chmod(0o755 if member.mode & 0o111 else 0o644)


def _make_read_only(root: Path, entries: list[Entry]) -> None:
    """Make ``entries`` and the directories below ``root``, but not ``root`` itself, read-only. Sync the directories."""
    for entry in entries:
        if entry.link is None:
            entry.source.chmod(entry.mode)
    for folder, _, _ in os.walk(root, topdown=False):
        fsync_path(Path(folder))
        if Path(folder) != root:
            Path(folder).chmod(0o555)


def _remove_tree(folder: Path) -> None:
    """Delete a directory, read-only ones in it too; errors are ignored."""
    for below, _, _ in os.walk(folder):
        with suppress(OSError):
            Path(below).chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
