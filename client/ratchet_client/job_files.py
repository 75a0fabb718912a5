"""Fetching what a job left in its working directory: all of it arrives before any of it gets its name here."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ratchet_client.errors import ServiceFault, ServiceUnreachable
from ratchet_client.exports import Body, beside, link, not_written
from ratchet_client.transport import Transport
from ratchet_contract.errors import Refused
from ratchet_contract.plural import counted

_READ_SECONDS: Final = 600.0
"""Until the first byte: the service looks at the whole directory before it answers."""
_CHUNK: Final = 1 << 20
_SHOWN: Final = 5
Bar = AbstractContextManager[Callable[[int], object]]


def no_bar(total: int) -> Bar:
    """Shows nothing."""
    return nullcontext(lambda _count: None)


@dataclass(frozen=True)
class Fetched:
    """``files``: what was written. ``notes``: what of the job's directory is not among them, in sentences."""

    files: list[Path]
    notes: list[str]


def fetch(
    transport: Transport,
    path: str,
    params: Mapping[str, str | None],
    folder: Path,
    force: bool,
    bar: Callable[[int], Bar] = no_bar,
) -> Fetched:
    """Write the archive at ``path`` of the service below ``folder``, which is made if need be. ``bar`` is called with the
    size of all files in bytes and opens a progress display, which is called with the number of bytes of each block that arrives.

    The files lie in a directory of their own in ``folder`` until all are whole, then each gets its name. Without ``force``
    nothing is written where a file of one of the names is there. Raises ``Refused`` (``output-exists``,
    ``output-not-written``), ``ServiceUnreachable`` for an answer that is cut short, ``ServiceFault`` for one that would write
    elsewhere, and what the service refuses.
    """
    made = not folder.exists()
    try:
        with transport.stream(path, params, {}, read=_READ_SECONDS) as response:
            folder.mkdir(exist_ok=True)
            total = int(response.headers.get("Ratchet-Size", "0"))
            with beside(folder / "ratchet-cp") as temporary, bar(total) as arrived:
                body: Any = Body(response.iter_bytes(_CHUNK))
                staged = _unpacked(body, temporary, arrived)
                while body.read(_CHUNK):  # the end of an answer is where it is known to be whole
                    pass
                files = _named(temporary, staged, folder, force)
        notes = [str(note) for note in json.loads(response.headers.get("Ratchet-Notes", "[]"))]
        if (gone := int(response.headers.get("Ratchet-Entries", "0")) - len(staged)) > 0:
            notes.append(f"{gone} had gone when their turn came")
        return Fetched(files, notes)
    except ServiceUnreachable as error:
        text = f"{error.detail}. Nothing was written to {folder}; the next copy begins anew"
        raise ServiceUnreachable(text, **error.extra) from error
    except OSError as error:
        raise not_written(folder, error) from error
    finally:
        if made:
            with suppress(OSError):  # something is in it
                folder.rmdir()


def _unpacked(body: Any, temporary: Path, arrived: Callable[[int], object]) -> list[str]:
    """Names of what a tar of files and directories held, below ``temporary`` now. Raises ``ServiceFault``, ``OSError``."""
    staged = []
    try:
        with tarfile.open(fileobj=body, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                place = temporary / _safe(member.name)
                place.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member) if member.isreg() else None
                if member.isdir():
                    place.mkdir(exist_ok=True)
                elif source is None:
                    raise _stranger(member.name)
                else:
                    _write(source, place, member, arrived)
                staged.append(member.name.rstrip("/"))
    except (FileExistsError, NotADirectoryError) as error:
        raise ServiceFault(f"the service sent a name twice ({error.filename}): nothing was kept") from error
    except tarfile.TarError as error:
        raise ServiceFault(f"what the service sent is not whole ({error}): nothing was kept, try again") from error
    return staged


def _safe(name: str) -> Path:
    """A path that cannot lead out of the directory that it is used in, on this system. Raises ``ServiceFault``."""
    path = Path(name)
    if not path.parts or path.anchor or ".." in path.parts:
        raise _stranger(name)
    return path


def _stranger(name: str) -> ServiceFault:
    return ServiceFault(f"the service sent {name!r}, which belongs to no job's files: nothing was kept")


def _write(source: Any, place: Path, member: tarfile.TarInfo, arrived: Callable[[int], object]) -> None:
    with place.open("xb") as out:
        while block := source.read(_CHUNK):
            out.write(block)
            arrived(len(block))
        out.flush()
        os.fsync(out.fileno())
    if member.mode & 0o100:
        place.chmod(place.stat().st_mode | (place.stat().st_mode & 0o444) >> 2)
    with suppress(OSError, OverflowError):  # a time that no file can have here
        os.utime(place, (member.mtime, member.mtime))


def _named(temporary: Path, staged: list[str], folder: Path, force: bool) -> list[Path]:
    """Give all files their names in ``folder``. Raises ``Refused`` (``output-exists``) before any has one, ``OSError``."""
    files = [name for name in staged if not (temporary / name).is_dir()]
    within = dict.fromkeys(part for name in staged for part in (*reversed(Path(name).parents), Path(name)))
    taken = [name for name in within if name.parts and not _free(folder / name, (temporary / name).is_dir(), force)]
    if taken:
        shown = ", ".join(repr(str(folder / name)) for name in taken[:_SHOWN])
        more = f" and {len(taken) - _SHOWN} more" if len(taken) > _SHOWN else ""
        cure = (
            "remove them first" if force else "name another directory, or replace files: --force, in Python force=True"
        )
        raise Refused(f"{shown}{more}: there already; {cure}. Nothing was written", code="output-exists")
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
    except OSError as error:  # somebody else is at work there
        before = f"{len(written)} of {counted(len(files), 'file')} had been, before it"
        text = f"{target} was not written: {error.strerror or error}; {before}"
        raise Refused(text, code="output-not-written") from error
    return written


def _free(target: Path, directory: bool, force: bool) -> bool:
    """May ``target`` be made, or replaced? A directory never becomes a file, nor a file a directory, and no link is followed
    to another one."""
    if not os.path.lexists(target):
        return True
    return target.is_dir() and not target.is_symlink() if directory else force and not target.is_dir()
