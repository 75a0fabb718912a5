"""Fetching what a checkpoint is exported as: whole and with the right digest under its name, or not there at all."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, Literal

try:
    import fcntl
except ImportError:  # Windows: what a killed export leaves there stays
    fcntl = None  # type: ignore[assignment]

from ratchet_client.errors import ServiceFault, ServiceUnreachable
from ratchet_client.transport import Transport
from ratchet_contract.errors import Refused

ExportFormat = Literal["safetensors", "torch", "dcp"]
_READ_SECONDS: Final = 3600.0
"""Until the first byte: the service reads and writes the whole checkpoint before it answers."""
_MEMBERS: Final = {
    "torch": re.compile(r"rank-\d{5}-of-\d{5}\.pt", re.ASCII),
    "dcp": re.compile(r"\.metadata|__\d{1,5}_\d{1,5}\.distcp", re.ASCII),
}
_DIGEST: Final = re.compile(r"sha-256=:([A-Za-z0-9+/=]+):", re.ASCII)
_CHUNK: Final = 1 << 20


def fetch(transport: Transport, path: str, form: ExportFormat, target: Path) -> list[str]:
    """Write the export at ``path`` of the service to ``target``, a file (``safetensors``) or a directory (``torch``, ``dcp``),
    which must not be there yet. Returns what its reader must know.

    It is written beside ``target`` and gets its name last; what killed exports to ``target`` had left there goes. Raises
    ``Refused`` (``output-exists``, ``output-not-written``), ``ServiceUnreachable`` for an answer that is cut short,
    ``ServiceFault`` for an altered one, and what the service refuses.
    """
    if os.path.lexists(target):
        raise _taken(target)
    try:
        with beside(target) as temporary, transport.stream(path, {"format": form}, {}, read=_READ_SECONDS) as response:
            body = Body(response.iter_bytes(_CHUNK))
            made = temporary / "whole"
            if form in _MEMBERS:
                made.mkdir()
                _unpack(body, made, _MEMBERS[form])
            else:
                _copy(body, made)
            body.finish(response.headers.get("Repr-Digest", ""))
            _give_name(made, target)
            return [str(note) for note in json.loads(response.headers.get("Ratchet-Notes", "[]"))]
    except ServiceUnreachable as error:
        text = f"{error.detail}. {target} was not written and nothing of it stays; an export begins anew"
        raise ServiceUnreachable(text, **error.extra) from error
    except OSError as error:
        raise not_written(target, error) from error


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A directory of its own beside ``target`` for as long as the block lasts. It is locked until this process ends, however it
    ends: one that nobody holds is left of a killed export, and is removed here."""
    parent, prefix = target.absolute().parent, f".{target.name[:100]}."
    left = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}\.tmp", re.ASCII)
    for path in [path for path in parent.iterdir() if left.fullmatch(path.name)]:
        with suppress(OSError):
            dead = _locked(path)
            try:
                shutil.rmtree(path)
            finally:
                os.close(dead)
    lock = None
    while lock is None:
        temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=parent))
        try:
            lock = _locked(temporary)
        except (BlockingIOError, FileNotFoundError):  # removed between its making and its lock
            continue
        except OSError:  # no locks on this file system: nobody takes what is here for dead
            break
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(directory: Path) -> int:
    """The descriptor that holds the lock. Raises ``OSError``: another has it, or it cannot be had."""
    if fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), directory.lstat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except BaseException:
        os.close(fd)
        raise
    return fd


class Body:
    """An answer's bytes as a file to read from, hashed on their way."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = memoryview(b"")
        self._hasher = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes; fewer only at the end."""
        parts = []
        while size:
            if not self._left:
                chunk = next(self._chunks, b"")
                if not chunk:
                    break
                self._hasher.update(chunk)
                self._left = memoryview(chunk)
            part, self._left = self._left[:size], self._left[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def finish(self, told: str) -> None:
        """Read to the end. Raises ``ServiceFault`` where the bytes are not those that ``told`` (Repr-Digest) speaks of."""
        while self.read(_CHUNK):
            pass
        match = _DIGEST.fullmatch(told)
        if match is None or base64.b64decode(match[1]) != self._hasher.digest():
            raise ServiceFault("the file arrived altered, its digest is another one: nothing was kept, try again")


def _copy(body: Body, target: Path) -> None:
    with target.open("xb") as out:
        while chunk := body.read(_CHUNK):
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())


def _unpack(body: Any, folder: Path, names: re.Pattern[str]) -> None:
    """Plain files of the form's ``names``, and nothing else that a tar may hold. Raises ``ServiceFault``."""
    try:
        with tarfile.open(fileobj=body, mode="r|") as tar:
            for member in tar:
                source: IO[bytes] | None = tar.extractfile(member) if member.isreg() else None
                if source is None or not names.fullmatch(member.name):
                    raise ServiceFault(
                        f"the service sent {member.name!r}, which belongs to no export: nothing was kept"
                    )
                with (folder / member.name).open("xb") as out:
                    shutil.copyfileobj(source, out, _CHUNK)
                    out.flush()
                    os.fsync(out.fileno())
    except tarfile.TarError as error:
        raise ServiceFault(f"what the service sent is not whole ({error}): nothing was kept, try again") from error


def _give_name(made: Path, target: Path) -> None:
    """Never in the place of something that came meanwhile, which a rename of a file would replace."""
    try:
        if made.is_dir():
            made.rename(target)
        else:
            link(made, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise _taken(target) from None
        raise


def link(made: Path, target: Path) -> None:
    """``target`` is the file ``made``, and never in the place of another. Raises ``FileExistsError``."""
    try:
        os.link(made, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        made.rename(target)


def _taken(target: Path) -> Refused:
    return Refused(f"{target} is there already: name another, or remove it first", code="output-exists")


def not_written(target: Path, error: OSError) -> Refused:
    advice = {
        errno.ENOSPC: "the disk is full: make room, or name a place on another one",
        errno.EDQUOT: "the disk quota is used up: make room, or name a place on another disk",
        errno.ENOENT: "make its directory first",
    }.get(error.errno or 0, "check the directory and its permissions")
    return Refused(
        f"{target} was not written: {error.strerror or error}; {advice}. Nothing of it stays", code="output-not-written"
    )
