"""Uploads the directory of a spec's ``code`` to the service, by default only if the service is on another machine."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ratchet_client.http.discovery import is_loopback
from ratchet_client.http.errors import ServiceUnreachable
from ratchet_client.http.transport import Body, Transport
from ratchet_contract.code import tree
from ratchet_contract.code.archive import MEDIA_TYPE, archive_size, write_archive
from ratchet_contract.code.choice import choose
from ratchet_contract.code.tree import Entry, TreeError
from ratchet_contract.errors import FieldProblem, NotFound, SpecError
from ratchet_contract.plural import pluralize
from ratchet_contract.spec.git_commit import git_facts

Note = Callable[[str], None]
"""Receives sentences about what the snapshot leaves out and, periodically, about the progress of a long upload."""
_LARGE: Final = 16 * 2**20
"""Bytes from which on the progress of an upload is reported."""
_PERIOD: Final = 5.0


def with_code(
    transport: Transport, spec: dict[str, Any], upload: bool | None, note: Note | None = None, *, within: str = ""
) -> dict[str, Any]:
    """Upload the directory ``code.path`` of this machine unless the service has it, and return a copy of ``spec`` with the
    directory's digest. Return ``spec`` itself if it names no such directory or has a digest already, or if ``upload`` or the
    service's address excludes an upload. ``upload``, ``note``: as in ``RatchetClient.submit``. ``within``: the JSON pointer of
    ``spec`` in the request, for error messages.

    Raises ``SpecError`` if the directory cannot be read or is not allowed as code.
    """
    code: Any = spec.get("code")
    if (
        not _of_a_directory(code)
        or upload is False
        or (upload is None and not _is_remote_service(transport, code["path"]))
    ):
        return spec
    root = Path(code["path"]).expanduser().absolute()
    try:
        choice = choose(root, code.get("include") or ())
        found = choice.entries
        for _, text in choice.notes():
            (note or _warn)(text)
        size = archive_size(found)
        told = note if note is not None and size >= _LARGE else _ignore
        told(
            f"the code in {root} is {_mib(size)}, {pluralize(len(found), 'file')}: sending it, unless the service has it already"
        )
        digest = tree.tree_digest(found)
        _send(transport, digest, found, size, told)
    except (TreeError, OSError) as error:
        raise _refused(error, root, f"{within}/code/path") from None
    sent = {**code, "path": str(root), "digest": digest}
    sent.pop("git", None)
    git = git_facts(root, found)
    return {**spec, "code": sent if git is None else {**sent, "git": git.model_dump(mode="json", exclude_none=True)}}


def _of_a_directory(code: Any) -> bool:
    """Return True if ``code``, the spec's key, names a directory to snapshot, and has no ``digest`` yet."""
    if not isinstance(code, Mapping) or not isinstance(code.get("path"), str) or not code["path"]:
        return False
    return code.get("digest") is None and code.get("source") in (None, "snapshot")


def _is_remote_service(transport: Transport, path: str) -> bool:
    """Return True if the service's address is known and no loopback address, and the directory ``path`` exists here."""
    with suppress(ServiceUnreachable, OSError):  # the submission itself reports an unreachable service
        return not is_loopback(transport.target.url()) and Path(path).expanduser().is_dir()
    return False


def _send(transport: Transport, digest: str, found: list[Entry], size: int, report: Note) -> None:
    """Upload the code with this digest, unless the service has it already. ``size``: bytes of the archive."""
    place = f"/v1/code/{digest}"
    try:
        transport.request("GET", place)
    except NotFound as error:
        if error.code != "code-not-found":
            raise
        body = Body(MEDIA_TYPE, size, lambda: _with_progress(write_archive(found), size, report))
        transport.request("PUT", place, body=body)


def _with_progress(parts: Iterator[bytes], size: int, report: Note) -> Iterator[bytes]:
    """Yield ``parts`` unchanged. At most every five seconds, call ``report`` with a text such as ``sent 10.0 MiB of 64.0 MiB``.
    ``size``: bytes of all parts."""
    sent, last = 0, time.monotonic()
    for part in parts:
        yield part
        sent += len(part)
        if time.monotonic() - last >= _PERIOD:
            last = time.monotonic()
            report(f"sent {_mib(sent)} of {_mib(size)}")


def _refused(error: TreeError | OSError, root: Path, pointer: str) -> SpecError:
    """Return the ``SpecError`` for a code directory ``root`` that cannot be used. ``pointer``: of ``code.path`` in the
    request."""
    code, detail = ("unreadable", f"cannot read {str(root)!r}: {error}")
    if isinstance(error, TreeError):
        code, detail = error.code, error.detail
        pointer = pointer.replace("/path", "/include") if code == "include-not-found" else pointer
    problem = FieldProblem(pointer=pointer, code=code, detail=detail)
    return SpecError(f"{pointer}: {detail}", errors=[problem])


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)  # the location is the line that calls the client


def _ignore(_: str) -> None:
    pass
