"""Downloads a checkpoint's export: it appears under its name complete and with the right digest, or not at all."""

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
except ImportError:  # Windows: what a killed export leaves behind is not removed
    fcntl = None  # type: ignore[assignment]

from ratchet_client.http.errors import ServiceFault, ServiceUnreachable
from ratchet_client.http.transport import Transport
from ratchet_contract.errors import Refused

ExportFormat = Literal["safetensors", "torch", "dcp"]
_READ_SECONDS: Final = 3600.0
"""Maximum seconds without data: the service reads and writes the whole checkpoint before it responds."""
_MEMBERS: Final = {
    "torch": re.compile(r"rank-\d{5}-of-\d{5}\.pt", re.ASCII),
    "dcp": re.compile(r"\.metadata|__\d{1,5}_\d{1,5}\.distcp", re.ASCII),
}
_DIGEST: Final = re.compile(r"sha-256=:([A-Za-z0-9+/=]+):", re.ASCII)
_CHUNK: Final = 1 << 20


def fetch(transport: Transport, path: str, form: ExportFormat, target: Path) -> list[str]:
    """Download the export at the API path ``path`` to the new ``target``, complete or not at all; return notes for its reader.

    Raises ``Refused`` if ``target`` exists or cannot be written, ``ServiceUnreachable`` for a truncated response,
    ``ServiceFault`` for an altered one.
    """
    if os.path.lexists(target):
        raise _exists_error(target)
    try:
        with (
            temporary_sibling(target) as temporary,
            transport.stream(path, {"format": form}, {}, read=_READ_SECONDS) as response,
        ):
            body = Body(response.iter_bytes(_CHUNK))
            made = temporary / "whole"
            if form in _MEMBERS:
                made.mkdir()
                _unpack(body, made, _MEMBERS[form])
            else:
                _copy(body, made)
            body.finish(response.headers.get("Repr-Digest", ""))
            _rename_into_place(made, target)
            return [str(note) for note in json.loads(response.headers.get("Ratchet-Notes", "[]"))]
    except ServiceUnreachable as error:
        text = f"{error.detail}. {target} was not written, and no part of it is kept; the next export starts over"
        raise ServiceUnreachable(text, **error.extra) from error
    except OSError as error:
        raise write_error(target, error) from error


@contextmanager
def temporary_sibling(target: Path) -> Iterator[Path]:
    """Yield a new temporary directory next to ``target``, and remove it after the block. Temporary directories of the same
    ``target`` that killed processes have left are removed as well, if possible."""
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
        except (BlockingIOError, FileNotFoundError):  # another process removed it before it was locked
            continue
        except OSError:  # no locks on this file system: no process removes the directory as left over
            break
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(directory: Path) -> int:
    """Lock the directory and return the lock's file descriptor. Raises ``BlockingIOError`` if it is locked, ``FileNotFoundError``
    if it was removed, another ``OSError`` if it cannot be locked."""
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
    """The bytes of a response, to be read like a file; they are hashed while they are read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._remaining = memoryview(b"")
        self._hasher = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer only at the end of the response."""
        parts = []
        while size:
            if not self._remaining:
                chunk = next(self._chunks, b"")
                if not chunk:
                    break
                self._hasher.update(chunk)
                self._remaining = memoryview(chunk)
            part, self._remaining = self._remaining[:size], self._remaining[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def finish(self, expected_digest: str) -> None:
        """Read the response to its end. Raises ``ServiceFault`` if its digest is not ``expected_digest``, the value of the header
        Repr-Digest."""
        while self.read(_CHUNK):
            pass
        match = _DIGEST.fullmatch(expected_digest)
        if match is None or base64.b64decode(match[1]) != self._hasher.digest():
            raise ServiceFault("the received file does not match its digest: nothing was kept, try again")


def _copy(body: Body, target: Path) -> None:
    """Write what is left of ``body`` to the new file ``target``, and sync it."""
    with target.open("xb") as out:
        while chunk := body.read(_CHUNK):
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())


def _unpack(body: Any, folder: Path, names: re.Pattern[str]) -> None:
    """Extract the tar stream ``body`` into ``folder``. Raises ``ServiceFault`` for an incomplete stream or an unexpected
    member."""
    try:
        with tarfile.open(fileobj=body, mode="r|") as tar:
            for member in tar:
                source: IO[bytes] | None = tar.extractfile(member) if member.isreg() else None
                if source is None or not names.fullmatch(member.name):
                    raise ServiceFault(
                        f"the service sent {member.name!r}, which is not part of an export: nothing was kept"
                    )
                with (folder / member.name).open("xb") as out:
                    shutil.copyfileobj(source, out, _CHUNK)
                    out.flush()
                    os.fsync(out.fileno())
    except tarfile.TarError as error:
        raise ServiceFault(f"the service's response is incomplete ({error}): nothing was kept, try again") from error


def _rename_into_place(source: Path, target: Path) -> None:
    """Give ``source`` the name ``target``. Raises ``Refused`` (``output-exists``) if ``target`` exists, unless both are
    directories and ``target`` is empty."""
    try:
        if source.is_dir():
            source.rename(target)
        else:
            link(source, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise _exists_error(target) from None
        raise


def link(source: Path, target: Path) -> None:
    """Give the file ``source`` the name ``target``; ``source`` may keep its old name as well. Raises ``FileExistsError`` if
    ``target`` exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        source.rename(target)


def _exists_error(target: Path) -> Refused:
    """Return, and do not raise, the error for a ``target`` that already exists."""
    return Refused(f"{target} already exists: name another, or remove it first", code="output-exists")


def write_error(target: Path, error: OSError) -> Refused:
    """Return the ``Refused`` (``output-not-written``) for a failed write to ``target``, with advice."""
    advice = {
        errno.ENOSPC: "the disk is full: free space, or name a path on another disk",
        errno.EDQUOT: "the disk quota is used up: free space, or name a path on another disk",
        errno.ENOENT: "make its directory first",
    }.get(error.errno or 0, "check the directory and its permissions")
    return Refused(
        f"{target} was not written: {error.strerror or error}; {advice}. No part of it is kept",
        code="output-not-written",
    )
