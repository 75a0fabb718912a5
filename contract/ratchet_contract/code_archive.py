"""A tree of code as a tar: written in the same bytes wherever it is made, unpacked whole, verified, or not at all.

What is unpacked is files and links, within the limits of a snapshot; what the digest does not confirm is not used. Who sent the
archive is not trusted. The dialect is GNU's, without extended headers: the one that ``archive`` writes.
"""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from ratchet_contract import code_tree
from ratchet_contract.code_tree import Entry, Limits, TreeError

MEDIA_TYPE: Final = "application/x-tar"
_BLOCK: Final = 256 * 1024
_LONG: Final = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MAX_LONG: Final = 4096 + tarfile.BLOCKSIZE
"""Bytes of a long name or link, which ``tarfile`` holds in memory; Linux has none longer than PATH_MAX."""
_PER_FILE: Final = 8192
"""Bytes around the content of a file at most: its header, its padding, a long name and a long link with headers of their own."""
_NAMES: Final = frozenset(
    {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP, errno.EINVAL}
)
"""What the system says of names that no tree can have: one twice, a file in the place of a directory, an empty link."""


class BadArchive(Exception):
    """What was sent is not what was asked for, or nothing that may be unpacked."""


def archive(found: list[Entry]) -> Iterator[bytes]:
    """A tar of sorted entries: the same bytes whenever and wherever it is made. Directories are not in it. Raises ``OSError``."""
    for entry in found:
        yield _header(entry)
        if entry.link is None:
            yield from _exactly(entry.source, entry.size)
            yield b"\0" * _padding(entry)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def archive_size(found: list[Entry]) -> int:
    """Bytes of ``archive``, without reading a file."""
    contents = sum(entry.size + _padding(entry) for entry in found if entry.link is None)
    return contents + sum(len(_header(entry)) for entry in found) + 2 * tarfile.BLOCKSIZE


def largest_archive(limits: Limits) -> int:
    """Bytes of no archive of a tree within ``limits`` are more."""
    return limits.max_bytes + limits.max_files * _PER_FILE + 2 * tarfile.BLOCKSIZE


def _header(entry: Entry) -> bytes:
    info = tarfile.TarInfo(entry.path)
    info.mode, info.size = entry.mode, entry.size
    if entry.link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _padding(entry: Entry) -> int:
    return -entry.size % tarfile.BLOCKSIZE


def _exactly(path: Path, size: int) -> Iterator[bytes]:
    """Raises ``OSError`` for a file that has changed: what is sent is then cut short, and nobody takes it for whole."""
    sent = 0
    for chunk in code_tree.chunks(path):
        sent += len(chunk)
        if sent > size:
            break
        yield chunk
    if sent != size:
        raise OSError(f"{os.fspath(path)!r} has changed: it had {size} bytes")


def unpack(archive: IO[bytes], digest: str, place: Path, *, one_file: bool = False, limits: Limits = Limits()) -> None:
    """Make ``place`` from a tar, read-only, whole or not at all. Somebody else who makes it meanwhile has made the same.

    Raises ``BadArchive``, ``OSError``, and what reading ``archive`` raises.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".tmp-", dir=place.parent))
    try:
        found = _verified(archive, digest, made, one_file, limits)
        _settle(made, found)
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():
                raise
        else:
            place.chmod(0o555)
            _sync(place.parent)
    finally:
        _discard(made)


def _verified(archive: IO[bytes], digest: str, made: Path, one_file: bool, limits: Limits) -> list[Entry]:
    """Unpack below ``made``; what lies there then, all of it under ``digest``."""
    try:
        with tarfile.open(
            fileobj=archive, mode="r|", encoding="utf-8", errors="surrogateescape", tarinfo=_Member
        ) as tar:
            count = _extract(tar, made, None if one_file else limits)
        found = [code_tree.file_entry(p) for p in made.iterdir()] if one_file else code_tree.entries(made, limits)
    except (tarfile.TarError, RecursionError) as error:  # RecursionError: headers upon headers
        raise BadArchive(f"it is no archive: {error}") from None
    except TreeError as error:
        raise BadArchive(error.detail) from None
    except OSError as error:
        if error.errno not in _NAMES:
            raise
        raise BadArchive(f"it has names that no directory can have: {error.strerror}") from None
    if len(found) != count:  # the digest does not tell of them, and an import would find them
        raise BadArchive("it has files that do not count as code, such as caches")
    got = code_tree.digest(found)
    if got != digest:
        raise BadArchive(f"its digest is {got}, not {digest}")
    return found


class _Member(tarfile.TarInfo):
    """Refuses a header before anything is made, or held in memory, because of it."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if self.type in _LONG:
            if not 0 <= self.size <= _MAX_LONG:
                raise BadArchive(f"a name in it is longer than {code_tree.MAX_PATH} bytes")
        elif self.type not in (tarfile.REGTYPE, tarfile.SYMTYPE) or self.size < 0:
            raise BadArchive(f"{self.name!r} in it is neither a file nor a symbolic link")
        return super()._proc_member(tar)  # type: ignore[misc]  # tarfile's own place for this, unknown to typeshed


def _extract(tar: tarfile.TarFile, target: Path, limits: Limits | None) -> int:
    """Files first, links when all of them are there: no file is written through a link. Returns how many there are."""
    links: list[tuple[Path, str]] = []
    count = total = 0
    for member in tar:
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in member.name:
            raise BadArchive(f"it has the name {member.name!r}")
        count, total = count + 1, total + member.size
        if limits is not None and (count > limits.max_files or total > limits.max_bytes):
            raise BadArchive(f"it has more than {limits.max_files} files or {limits.max_bytes >> 20} MiB")
        if len(os.fsencode(member.name)) > code_tree.MAX_PATH:
            raise BadArchive(f"a name in it is longer than {code_tree.MAX_PATH} bytes")
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if member.type == tarfile.SYMTYPE:
            links.append((place, member.linkname))
        else:
            _write(tar, member, place)
    for place, linked in links:
        place.symlink_to(linked)
    return count


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    source = tar.extractfile(member)
    assert source is not None
    with place.open("xb") as out:
        while block := source.read(_BLOCK):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    place.chmod(0o755 if member.mode & 0o111 else 0o644)


def _settle(root: Path, found: list[Entry]) -> None:
    """Read-only and on the disk, but for the outermost directory: one is renamed only while it can be written."""
    for entry in found:
        if entry.link is None:
            entry.source.chmod(entry.mode)
    for folder, _, _ in os.walk(root, topdown=False):
        _sync(Path(folder))
        if Path(folder) != root:
            Path(folder).chmod(0o555)


def _discard(folder: Path) -> None:
    for below, _, _ in os.walk(folder):
        Path(below).chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
