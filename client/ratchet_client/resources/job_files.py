"""Downloads files from a job's working directory. They get their final names only after all have arrived."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ratchet_client.http.errors import ServiceFault, ServiceUnreachable
from ratchet_client.http.transport import Transport
from ratchet_client.resources.export_download import Body, link, temporary_sibling, write_error
from ratchet_contract.errors import Refused
from ratchet_contract.plural import pluralize

_READ_SECONDS: Final = 600.0
"""Maximum seconds without data: the service reads the whole directory tree before it responds."""
_CHUNK: Final = 1 << 20
_SHOWN: Final = 5
Bar = AbstractContextManager[Callable[[int], object]]


def no_progress(total: int) -> Bar:
    """Return a progress display that shows nothing: a context manager that yields a function. The function takes the number of
    bytes in a block, and ignores it."""
    return nullcontext(lambda _count: None)


@dataclass(frozen=True)
class Fetched:
    """The result of a download. ``files``: the files that were written. ``notes``: sentences about left-out files."""

    files: list[Path]
    notes: list[str]


def fetch(
    transport: Transport,
    path: str,
    params: Mapping[str, str | None],
    folder: Path,
    force: bool,
    bar: Callable[[int], Bar] = no_progress,
) -> Fetched:
    """Download the archive at the API path ``path`` and extract it below ``folder``. ``force``: replace existing files. ``bar``:
    a function like ``no_progress``, called with the total size in bytes.

    Raises ``Refused`` if files are in the way, in which case nothing is written, or if a file cannot be written. Raises
    ``ServiceUnreachable`` for a truncated response, and ``ServiceFault`` for an invalid archive.
    """
    made = not folder.exists()
    try:
        with transport.stream(path, params, {}, read=_READ_SECONDS) as response:
            folder.mkdir(exist_ok=True)
            total = int(response.headers.get("Ratchet-Size", "0"))
            with temporary_sibling(folder / "ratchet-cp") as temporary, bar(total) as arrived:
                body: Any = Body(response.iter_bytes(_CHUNK))
                staged = _unpack(body, temporary, arrived)
                while body.read(_CHUNK):  # only the end of a response shows that it is complete
                    pass
                files = _move_into_place(temporary, staged, folder, force)
        notes = [str(note) for note in json.loads(response.headers.get("Ratchet-Notes", "[]"))]
        if (gone := int(response.headers.get("Ratchet-Entries", "0")) - len(staged)) > 0:
            notes.append(f"{gone} left out: gone before being copied")
        return Fetched(files, notes)
    except ServiceUnreachable as error:
        text = f"{error.detail}. Nothing was written to {folder}; the next copy starts over"
        raise ServiceUnreachable(text, **error.extra) from error
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        if made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _unpack(body: Any, temporary: Path, on_bytes: Callable[[int], object]) -> list[str]:
    """Extract the tar stream ``body`` below ``temporary``, and return the members' names. Raises ``ServiceFault`` for an invalid
    archive."""
    staged = []
    try:
        with tarfile.open(fileobj=body, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                place = temporary / _safe_path(member.name)
                place.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member) if member.isreg() else None
                if member.isdir():
                    place.mkdir(exist_ok=True)
                elif source is None:
                    raise _unsafe_member_error(member.name)
                else:
                    _write(source, place, member, on_bytes)
                staged.append(member.name.rstrip("/"))
    except (FileExistsError, NotADirectoryError) as error:
        raise ServiceFault(f"the service sent a name twice ({error.filename}): nothing was kept") from error
    except tarfile.TarError as error:
        raise ServiceFault(f"the service's response is incomplete ({error}): nothing was kept, try again") from error
    return staged


def _safe_path(name: str) -> Path:
    """Return ``name`` as a relative path. Raises ``ServiceFault`` if it is empty or could lead out of a directory."""
    path = Path(name)
    if not path.parts or path.anchor or ".." in path.parts:
        raise _unsafe_member_error(name)
    return path


def _unsafe_member_error(name: str) -> ServiceFault:
    """Return, and do not raise, the error for a member of the archive that is not a job's file."""
    return ServiceFault(f"the service sent {name!r}, which is not a job's file: nothing was kept")


def _write(source: Any, place: Path, member: tarfile.TarInfo, on_bytes: Callable[[int], object]) -> None:
    """Write the member's content from ``source`` to the new file ``place``, with its time and its execute permission."""
    with place.open("xb") as out:
        while block := source.read(_CHUNK):
            out.write(block)
            on_bytes(len(block))
        out.flush()
        os.fsync(out.fileno())
    if member.mode & 0o100:
        place.chmod(place.stat().st_mode | (place.stat().st_mode & 0o444) >> 2)
    with suppress(OSError, OverflowError):  # a time that this file system cannot store
        os.utime(place, (member.mtime, member.mtime))


def _move_into_place(temporary: Path, staged: list[str], folder: Path, force: bool) -> list[Path]:
    """Move all extracted files to their names in ``folder``, and return their paths. Raises ``Refused`` with ``output-exists`` if
    files are in the way; nothing is moved then. Raises ``Refused`` with ``output-not-written`` if a move fails, perhaps after
    others have succeeded."""
    files = [name for name in staged if not (temporary / name).is_dir()]
    within = dict.fromkeys(part for name in staged for part in (*reversed(Path(name).parents), Path(name)))
    taken = [
        name for name in within if name.parts and not _is_replaceable(folder / name, (temporary / name).is_dir(), force)
    ]
    if taken:
        shown = ", ".join(repr(str(folder / name)) for name in taken[:_SHOWN])
        more = f" and {len(taken) - _SHOWN} more" if len(taken) > _SHOWN else ""
        cure = (
            "remove them first" if force else "name another directory, or replace files: --force, in Python force=True"
        )
        raise Refused(f"already exists: {shown}{more}; {cure}. Nothing was written", code="output-exists")
    written: list[Path] = []
    try:
        for name in staged:
            target = folder / name
            if (temporary / name).is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if force:
                (temporary / name).replace(target)
            else:
                link(temporary / name, target)
            written.append(target)
    except OSError as error:  # another process changes the directory
        before = f"{len(written)} of {pluralize(len(files), 'file')} had been written before it"
        text = f"{target} was not written: {error.strerror or error}; {before}"
        raise Refused(text, code="output-not-written") from error
    return written


def _is_replaceable(target: Path, directory: bool, force: bool) -> bool:
    """Return True if a fetched file, or directory (``directory`` true), may be put at ``target``."""
    if not os.path.lexists(target):
        return True
    return target.is_dir() and not target.is_symlink() if directory else force and not target.is_dir()
