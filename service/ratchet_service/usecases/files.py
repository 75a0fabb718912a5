"""What a job left in its working directory: listed, one file read, a directory as a tar. By default without what its code brought
there and nobody has changed since."""

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

from ratchet_contract.api import FileKind, FileView, Page
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import HomePaths, JobPaths, is_job_id
from ratchet_service import cursors
from ratchet_service.database import Database
from ratchet_service.file_owner import as_owner
from ratchet_service.models import Job
from ratchet_service.problems import printable
from ratchet_service.transitions import no_such_job
from ratchet_service.turns import Turns
from ratchet_service.usecases import kept_outputs
from ratchet_service.work_directory import CodeCopy, Found, look, open_file, opened, parts_of, walk

_BLOCK: Final = 1 << 20
_NOT_TEXT: Final = "name-not-utf8"


@dataclass(frozen=True)
class Limits:
    """Of one answer. ``compared``: bytes that are read to tell the code's files from the job's own."""

    entries: int = 100_000
    size: int = 256 << 30
    compared: int = 64 << 20


@dataclass(frozen=True)
class Content:
    """One file, open. ``held``: what is given back once it is sent."""

    file: BinaryIO
    name: str
    size: int
    etag: str
    held: ExitStack

    def parts(self, begin: int, end: int) -> Iterator[bytes]:
        """Raises ``OSError`` for a file that has become shorter: what is sent is then cut short."""
        self.file.seek(begin)
        yield from _exactly(self.file, end - begin, self.name)


@dataclass(frozen=True)
class Archive:
    """A tar of files and directories. ``entries``, ``size``: of what is to be in it, number and bytes; ``notes``: what is not."""

    parts: Iterator[bytes]
    name: str
    entries: int
    size: int
    notes: list[str]
    held: ExitStack


@dataclass(frozen=True)
class Files:
    """``turns``: of files and archives that are being sent."""

    database: Database
    homes: HomePaths
    turns: Turns
    limits: Limits = Limits()

    def page(
        self, job_id: str, path: str, *, recursive: bool, everything: bool, limit: int, cursor: str | None
    ) -> Page[FileView]:
        """What lies below ``path``, a directory, or is ``path``. ``everything``: with what the code brought there unchanged.

        Raises ``NotFound`` (``job-not-found``, ``file-not-found``), ``Refused`` (``unsafe-path``, ``symbolic-link``,
        ``file-unreadable``, ``too-deep``, ``too-many-files``, ``bad-cursor``).
        """
        job, code = self._job(job_id)
        query = cursors.query_digest(of="files", job=job_id, path=path, recursive=recursive, all=everything)
        mark = cursors.decode(cursor, query, (str,))
        after = () if mark is None else tuple(os.fsdecode(bytes.fromhex(part)) for part in _hex_parts(mark[0]))
        parts = parts_of(path)
        items: list[FileView] = []
        last: list[str] = []
        with as_owner(job.root):
            try:
                with opened(job):
                    copy = CodeCopy(code, self.limits.compared)
            except NotFound:
                if parts:
                    raise
                return Page[FileView](items=[], next_cursor=None)  # no attempt has made it yet
            with opened(job, parts[:-1]) as outer:
                single = look(parts[-1], outer, "/".join(parts)) if parts else None
                if single is not None and not single.is_folder:
                    return Page[FileView](items=[_view(single, copy.has(single))], next_cursor=None)
            with opened(job, parts) as folder:
                for found in walk(folder, parts, after, deep=recursive):
                    unchanged = copy.has(found)
                    if unchanged and not everything:
                        continue
                    if len(items) == limit:
                        position = ".".join(os.fsencode(name).hex() for name in last)
                        return Page[FileView](items=items, next_cursor=cursors.encode(query, [position]))
                    items.append(_view(found, unchanged))
                    last = found.path.split("/")[len(parts) :]
        return Page[FileView](items=items, next_cursor=None)

    def content(self, job_id: str, path: str) -> Content:
        """Raises what ``page`` raises, and ``Refused`` (``special-file``, ``is-directory``, ``busy``)."""
        job, _ = self._job(job_id)
        parts = parts_of(path)
        if not parts:
            raise Refused("name a file: this is the whole working directory", code="is-directory")
        with ExitStack() as held:
            held.enter_context(self.turns.taken())
            with as_owner(job.root), opened(job, parts[:-1]) as folder:
                file = held.enter_context(os.fdopen(open_file(parts[-1], folder, path), "rb"))
            seen = os.fstat(file.fileno())
            etag = f'"{seen.st_ino:x}-{seen.st_size:x}-{seen.st_mtime_ns:x}"'
            return Content(file, parts[-1], seen.st_size, etag, held.pop_all())

    def archive(self, job_id: str, path: str, *, everything: bool) -> Archive:
        """Of the directory ``path``, or of the one file; members are named from the directory that holds it.

        Raises what ``page`` raises, and ``Refused`` (``busy``, ``archive-too-large``; ``symbolic-link`` and its like where
        ``path`` itself is none to read).
        """
        job, code = self._job(job_id)
        parts = parts_of(path)
        with ExitStack() as held:
            held.enter_context(self.turns.taken())
            with as_owner(job.root):
                copy = CodeCopy(None if everything else code, self.limits.compared)
                members, left_out = self._members(job, parts, copy)
            stream = _tar(job, members, len("/".join(parts[:-1])) + 1 if len(parts) > 1 else 0)
            held.callback(stream.close)
            notes = [f"{count} left out: {_LEFT_OUT[code]}" for code, count in sorted(left_out.items())]
            size = sum(found.stat.st_size for found in members if found.is_file)
            name = parts[-1] if parts else job_id
            return Archive(stream, f"{name}.tar", len(members), size, notes, held.pop_all())

    def _members(self, job: JobPaths, parts: tuple[str, ...], copy: CodeCopy) -> tuple[list[Found], Counter[str]]:
        members: list[Found] = []
        left_out: Counter[str] = Counter()
        size = 0
        with opened(job, parts[:-1]) as outer:
            single = look(parts[-1], outer, "/".join(parts)) if parts else None
            if single is not None and not single.is_folder:
                os.close(open_file(parts[-1], outer, single.path))  # or the reason why not
                return [single], left_out
        with opened(job, parts) as folder:
            for found in walk(folder, parts):
                if copy.has(found):
                    continue
                if found.refused is not None:
                    left_out[found.refused] += 1
                    continue
                members.append(found)
                size += found.stat.st_size if found.is_file else 0
                if len(members) > self.limits.entries:
                    raise Refused(
                        f"there are more than {self.limits.entries} files and directories in it: fetch the directories in it one "
                        "by one",
                        code="too-many-files",
                    )
                if size > self.limits.size:
                    raise Refused(
                        f"its files have more than {self.limits.size} bytes in all: fetch the directories in it, or its files, "
                        "one by one",
                        code="archive-too-large",
                    )
        return members, left_out

    def _job(self, job_id: str) -> tuple[JobPaths, Path | None]:
        """Its directory, and the snapshot of its code. Also of a job that was deleted without outputs. Raises ``NotFound``."""
        if not is_job_id(job_id):
            raise no_such_job(job_id)
        with self.database.read() as session:
            job = session.get(Job, job_id)
            digest = None if job is None else job.resolved.get("code_digest")
        paths = self.homes.job(job_id)
        if job is None and kept_outputs.owner(paths) is None:
            raise no_such_job(job_id)
        return paths, None if digest is None else self.homes.code / digest


_LEFT_OUT: Final = {
    "symbolic-link": "symbolic links",
    "special-file": "FIFOs, sockets and devices",
    "file-unreadable": "files and directories that the service may not read",
    "too-deep": "directories that lie too deep",
    "file-not-found": "files that had gone",
}


def _hex_parts(text: str) -> list[str]:
    parts = text.split(".")
    if not all(part and len(part) % 2 == 0 and set(part) <= set("0123456789abcdef") for part in parts):
        raise Refused("this cursor is not one that the server gave out; start again without it", code="bad-cursor")
    return parts


def _view(found: Found, unchanged: bool) -> FileView:
    kinds: Sequence[tuple[bool, FileKind]] = (
        (found.is_file, "file"), (found.is_folder, "directory"), (found.is_link, "symlink"),
    )  # fmt: skip
    refused = found.refused
    if refused is None and found.is_file and printable(found.path) != found.path:
        refused = _NOT_TEXT
    return FileView(
        path=printable(found.path),
        kind=next((kind for holds, kind in kinds if holds), "special"),
        size=found.stat.st_size if found.is_file else None,
        modified_at=_moment(found.stat.st_mtime),
        from_code=unchanged,
        refused=refused,
    )


def _moment(seconds: float) -> datetime | None:
    """None for a time that user code has given a file, and that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _tar(job: JobPaths, members: Sequence[Found], cut: int) -> Generator[bytes]:
    """Each file with the bytes that it has when its turn comes. One that has gone by then, or is no file any more, is not in it:
    the receiver counts. ``cut``: characters that the members' names begin behind."""
    for found in members:
        info = tarfile.TarInfo(found.path[cut:])
        info.mtime = int(found.stat.st_mtime)
        if found.is_folder:
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            yield _header(info)
            continue
        try:
            *folders, name = found.path.split("/")
            with as_owner(job.root), opened(job, tuple(folders)) as folder:
                file = os.fdopen(open_file(name, folder, found.path), "rb")
        except (NotFound, Refused):
            continue
        with file:
            seen = os.fstat(file.fileno())
            info.size, info.mode = seen.st_size, 0o755 if seen.st_mode & 0o100 else 0o644
            yield _header(info)
            yield from _exactly(file, info.size, found.path)
            yield b"\0" * (-info.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _exactly(file: BinaryIO, size: int, path: str) -> Iterator[bytes]:
    left = size
    while left:
        block = file.read(min(left, _BLOCK))
        if not block:
            raise OSError(f"{path!r} has become shorter while it was sent: it had {size} bytes")
        left -= len(block)
        yield block
