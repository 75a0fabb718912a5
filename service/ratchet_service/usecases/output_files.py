"""Files in a job's working directory: list them, read one, pack a directory as a tar; by default without unchanged files of
the job's code."""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

from ratchet_contract.api.views import FileKind, FileView, Page
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import HomePaths, JobPaths, is_job_id
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job
from ratchet_service.db.sanitize import printable
from ratchet_service.db.transitions import no_such_job
from ratchet_service.isolation.concurrency_limit import ConcurrencyLimit
from ratchet_service.isolation.file_access import as_owner
from ratchet_service.job_files import kept_outputs
from ratchet_service.job_files.work_directory import (
    CodeCopy,
    DirEntry,
    open_file,
    open_folder,
    split_path,
    stat_entry,
    walk,
)
from ratchet_service.usecases import pagination

_BLOCK: Final = 1 << 20
_NOT_TEXT: Final = "name-not-utf8"


@dataclass(frozen=True)
class Limits:
    """Limits of one response. ``entries``: the number of members of an archive. ``total_bytes``: the size of all files in an
    archive. ``compared_bytes``: how much is read to find unchanged files of the code."""

    entries: int = 100_000
    total_bytes: int = 256 << 30
    compared_bytes: int = 64 << 20


@dataclass(frozen=True)
class Content:
    """One open file of a working directory. ``size``: in bytes; ``etag``: with quotes. The caller must close ``resources``."""

    file: BinaryIO
    name: str
    size: int
    etag: str
    resources: ExitStack

    def read_range(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes from ``begin`` up to and without ``end``, in blocks. Raise ``OSError`` if the file has become
        shorter."""
        self.file.seek(begin)
        yield from _read_exactly(self.file, end - begin, self.name)


@dataclass(frozen=True)
class Archive:
    """A tar that is made while it is sent. ``entries``, ``size``: planned members and the bytes of their files. ``notes``:
    sentences about what is left out. The caller must close ``resources``."""

    parts: Iterator[bytes]
    name: str
    entries: int
    size: int
    notes: list[str]
    resources: ExitStack


@dataclass(frozen=True)
class Files:
    """Reads the files in jobs' working directories. ``permits``: limit on concurrent responses with files and archives."""

    database: Database
    homes: HomePaths
    permits: ConcurrencyLimit
    limits: Limits = Limits()

    def page(
        self, job_id: str, path: str, *, recursive: bool, include_unchanged: bool, limit: int, cursor: str | None
    ) -> Page[FileView]:
        """Return a page of the directory or file ``path``. ``path`` is relative to the working directory; ``""`` is the working
        directory itself, which is empty before the first attempt. ``recursive``: with the content of directories.
        ``include_unchanged``: in a directory, also unchanged entries of the job's code. Raise ``NotFound`` or ``Refused``."""
        job, code = self._job(job_id)
        query = pagination.query_digest(of="files", job=job_id, path=path, recursive=recursive, all=include_unchanged)
        mark = pagination.decode(cursor, query, (str,))
        after = () if mark is None else tuple(os.fsdecode(bytes.fromhex(part)) for part in _hex_parts(mark[0]))
        parts = split_path(path)
        items: list[FileView] = []
        last: list[str] = []
        with as_owner(job.root):
            try:
                with open_folder(job):
                    copy = CodeCopy(code, self.limits.compared_bytes)
            except NotFound:
                if parts:
                    raise
                return Page[FileView](items=[], next_cursor=None)  # no attempt has created it yet
            with open_folder(job, parts[:-1]) as outer:
                single = stat_entry(parts[-1], outer, "/".join(parts)) if parts else None
                if single is not None and not single.is_folder:
                    return Page[FileView](items=[_file_view(single, copy.is_unchanged(single))], next_cursor=None)
            with open_folder(job, parts) as folder:
                for found in walk(folder, parts, after, recursive=recursive):
                    unchanged = copy.is_unchanged(found)
                    if unchanged and not include_unchanged:
                        continue
                    if len(items) == limit:
                        position = ".".join(os.fsencode(name).hex() for name in last)
                        return Page[FileView](items=items, next_cursor=pagination.encode(query, [position]))
                    items.append(_file_view(found, unchanged))
                    last = found.path.split("/")[len(parts) :]
        return Page[FileView](items=items, next_cursor=None)

    def content(self, job_id: str, path: str) -> Content:
        """Return the file ``path``, opened; the caller must close its ``resources``. Raise ``NotFound`` or ``Refused``."""
        job, _ = self._job(job_id)
        parts = split_path(path)
        if not parts:
            raise Refused("name a file: this is the whole working directory", code="is-directory")
        with ExitStack() as held:
            held.enter_context(self.permits.acquire())
            with as_owner(job.root), open_folder(job, parts[:-1]) as folder:
                file = held.enter_context(os.fdopen(open_file(parts[-1], folder, path), "rb"))
            seen = os.fstat(file.fileno())
            etag = f'"{seen.st_ino:x}-{seen.st_size:x}-{seen.st_mtime_ns:x}"'
            return Content(file, parts[-1], seen.st_size, etag, held.pop_all())

    def archive(self, job_id: str, path: str, *, include_unchanged: bool) -> Archive:
        """Return a tar of the directory or file ``path``. In a directory, links, special files and entries that cannot be read
        are left out. The caller must close the ``resources`` of the result. ``include_unchanged``: in a directory, also unchanged
        entries of the job's code. Raise ``NotFound`` or ``Refused``."""
        job, code = self._job(job_id)
        parts = split_path(path)
        with ExitStack() as held:
            held.enter_context(self.permits.acquire())
            with as_owner(job.root):
                copy = CodeCopy(None if include_unchanged else code, self.limits.compared_bytes)
                members, left_out = self._members(job, parts, copy)
            stream = _tar_stream(job, members, len("/".join(parts[:-1])) + 1 if len(parts) > 1 else 0)
            held.callback(stream.close)
            notes = [f"{count} left out: {_LEFT_OUT[code]}" for code, count in sorted(left_out.items())]
            size = sum(found.stat.st_size for found in members if found.is_file)
            name = parts[-1] if parts else job_id
            return Archive(stream, f"{name}.tar", len(members), size, notes, held.pop_all())

    def _members(self, job: JobPaths, parts: tuple[str, ...], copy: CodeCopy) -> tuple[list[DirEntry], Counter[str]]:
        """Return the members of an archive, and code -> number of entries left out for that reason. Raise ``NotFound`` or
        ``Refused``."""
        members: list[DirEntry] = []
        left_out: Counter[str] = Counter()
        size = 0
        with open_folder(job, parts[:-1]) as outer:
            single = stat_entry(parts[-1], outer, "/".join(parts)) if parts else None
            if single is not None and not single.is_folder:
                os.close(open_file(parts[-1], outer, single.path))  # raises if it cannot be read
                return [single], left_out
        with open_folder(job, parts) as folder:
            for found in walk(folder, parts):
                if copy.is_unchanged(found):
                    continue
                if found.refused is not None:
                    left_out[found.refused] += 1
                    continue
                members.append(found)
                size += found.stat.st_size if found.is_file else 0
                if len(members) > self.limits.entries:
                    raise Refused(
                        f"it has more than {self.limits.entries} files and directories: fetch its directories one by one",
                        code="too-many-files",
                    )
                if size > self.limits.total_bytes:
                    raise Refused(
                        f"its files have more than {self.limits.total_bytes} bytes in all: fetch its directories or files "
                        "one by one",
                        code="archive-too-large",
                    )
        return members, left_out

    def _job(self, job_id: str) -> tuple[JobPaths, Path | None]:
        """Return the job's paths and its code's snapshot, if any; also for a deleted job with kept outputs. Raise
        ``NotFound``."""
        if not is_job_id(job_id):
            raise no_such_job(job_id)
        with self.database.read() as session:
            job = session.get(Job, job_id)
            digest = None if job is None else job.resolved.get("code_digest")
        paths = self.homes.job(job_id)
        if job is None and kept_outputs.read_owner(paths) is None:
            raise no_such_job(job_id)
        return paths, None if digest is None else self.homes.code / digest


_LEFT_OUT: Final = {
    "symbolic-link": "symbolic links",
    "special-file": "FIFOs, sockets and devices",
    "file-unreadable": "files and directories without read permission for the service",
    "too-deep": "directories nested too deeply",
    "file-not-found": "files that were deleted meanwhile",
}


def _hex_parts(text: str) -> list[str]:
    """Return the parts of a cursor's position, which are file names in hexadecimal digits. Raises ``Refused``
    (``bad-cursor``)."""
    parts = text.split(".")
    if not all(part and len(part) % 2 == 0 and set(part) <= set("0123456789abcdef") for part in parts):
        raise pagination.unknown_cursor_error()
    return parts


def _file_view(entry: DirEntry, unchanged: bool) -> FileView:
    """Return the API's view of ``entry``. ``unchanged``: it is an unchanged file of the job's code."""
    kinds: Sequence[tuple[bool, FileKind]] = (
        (entry.is_file, "file"), (entry.is_folder, "directory"), (entry.is_link, "symlink"),
    )  # fmt: skip
    refused = entry.refused
    if refused is None and entry.is_file and printable(entry.path) != entry.path:
        refused = _NOT_TEXT
    return FileView(
        path=printable(entry.path),
        kind=next((kind for holds, kind in kinds if holds), "special"),
        size=entry.stat.st_size if entry.is_file else None,
        modified_at=_timestamp(entry.stat.st_mtime),
        from_code=unchanged,
        refused=refused,
    )


def _timestamp(seconds: float) -> datetime | None:
    """Return the time as a UTC datetime; None if it is outside the calendar's range."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    # user code may set any time
    except (ValueError, OverflowError, OSError):
        return None


def _tar_stream(job: JobPaths, members: Sequence[DirEntry], prefix_length: int) -> Generator[bytes]:
    """Yield the bytes of the archive, without files that can no longer be opened. Raise ``OSError`` if a file becomes shorter
    while it is read. ``prefix_length``: number of leading characters removed from member names."""
    for found in members:
        info = tarfile.TarInfo(found.path[prefix_length:])
        info.mtime = int(found.stat.st_mtime)
        if found.is_folder:
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            yield _header(info)
            continue
        try:
            *folders, name = found.path.split("/")
            with as_owner(job.root), open_folder(job, tuple(folders)) as folder:
                file = os.fdopen(open_file(name, folder, found.path), "rb")
        # left out: the client notices that by counting the members
        except (NotFound, Refused):
            continue
        with file:
            seen = os.fstat(file.fileno())
            info.size, info.mode = seen.st_size, 0o755 if seen.st_mode & 0o100 else 0o644
            yield _header(info)
            yield from _read_exactly(file, info.size, found.path)
            yield b"\0" * (-info.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _header(info: tarfile.TarInfo) -> bytes:
    """Return the header of one member, in GNU tar format."""
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _read_exactly(file: BinaryIO, size: int, path: str) -> Iterator[bytes]:
    """Yield ``size`` bytes of the file in blocks. Raises ``OSError`` if the file ends before."""
    left = size
    while left:
        block = file.read(min(left, _BLOCK))
        if not block:
            raise OSError(f"{path!r} was truncated while it was sent: it had {size} bytes")
        left -= len(block)
        yield block
