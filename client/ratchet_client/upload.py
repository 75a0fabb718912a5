"""The directory of a spec's ``code``, sent to a service that does not see it: by digest, and only where it is not there yet."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ratchet_client.discovery import is_loopback
from ratchet_client.errors import ServiceUnreachable
from ratchet_client.transport import Body, Transport
from ratchet_contract import code_tree
from ratchet_contract.code_archive import MEDIA_TYPE, archive, archive_size
from ratchet_contract.code_choice import choose
from ratchet_contract.code_tree import Entry, TreeError
from ratchet_contract.errors import FieldProblem, NotFound, SpecError
from ratchet_contract.git_facts import git_facts
from ratchet_contract.plural import counted

Note = Callable[[str], None]
"""Is told in sentences what the snapshot leaves out and, now and then, how far what takes long has come."""
_LARGE: Final = 16 * 2**20
"""Bytes from which on sending is worth a word."""
_PERIOD: Final = 5.0


def with_code(
    transport: Transport, spec: dict[str, Any], upload: bool | None, note: Note | None = None, *, within: str = ""
) -> dict[str, Any]:
    """``spec`` with ``code.digest``, once the service has the directory ``code.path`` of this machine; unchanged where there is
    nothing to send. ``upload`` None: where the service's address is another machine's, and there is such a directory here.

    ``within``: the pointer of ``spec`` in the request. Raises ``SpecError`` at ``/code/path``, and what a request raises.
    """
    code: Any = spec.get("code")
    if not _of_a_directory(code) or upload is False or (upload is None and not _elsewhere(transport, code["path"])):
        return spec
    root = Path(code["path"]).expanduser().absolute()
    try:
        choice = choose(root, code.get("include") or ())
        found = choice.entries
        for _, text in choice.notes():
            (note or _warned)(text)
        size = archive_size(found)
        told = note if note is not None and size >= _LARGE else _silent
        told(
            f"the code in {root} is {_mib(size)}, {counted(len(found), 'file')}: sending it, unless the service has it already"
        )
        digest = code_tree.digest(found)
        _send(transport, digest, found, size, told)
    except (TreeError, OSError) as error:
        raise _refused(error, root, f"{within}/code/path") from None
    sent = {**code, "path": str(root), "digest": digest}
    sent.pop("git", None)
    git = git_facts(root, found)
    return {**spec, "code": sent if git is None else {**sent, "git": git.model_dump(mode="json", exclude_none=True)}}


def _of_a_directory(code: Any) -> bool:
    """What is not the shape of a spec is the service's to refuse."""
    if not isinstance(code, Mapping) or not isinstance(code.get("path"), str) or not code["path"]:
        return False
    return code.get("digest") is None and code.get("source") in (None, "snapshot")


def _elsewhere(transport: Transport, path: str) -> bool:
    with suppress(ServiceUnreachable, OSError):  # whom nobody reaches, the submission itself tells of
        return not is_loopback(transport.target.url()) and Path(path).expanduser().is_dir()
    return False


def _send(transport: Transport, digest: str, found: list[Entry], size: int, told: Note) -> None:
    """Upload the code, unless the service has it already."""
    place = f"/v1/code/{digest}"
    try:
        transport.request("GET", place)
    except NotFound as error:
        if error.code != "code-not-found":
            raise
        body = Body(MEDIA_TYPE, size, lambda: _watched(archive(found), size, told))
        transport.request("PUT", place, body=body)


def _watched(parts: Iterator[bytes], size: int, told: Note) -> Iterator[bytes]:
    sent, last = 0, time.monotonic()
    for part in parts:
        yield part
        sent += len(part)
        if time.monotonic() - last >= _PERIOD:
            last = time.monotonic()
            told(f"sent {_mib(sent)} of {_mib(size)}")


def _refused(error: TreeError | OSError, root: Path, pointer: str) -> SpecError:
    code, detail = ("unreadable", f"cannot read {str(root)!r}: {error}")
    if isinstance(error, TreeError):
        code, detail = error.code, error.detail
        pointer = pointer.replace("/path", "/include") if code == "include-not-found" else pointer
    problem = FieldProblem(pointer=pointer, code=code, detail=detail)
    return SpecError(f"{pointer}: {detail}", errors=[problem])


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _warned(text: str) -> None:
    warnings.warn(text, stacklevel=4)  # of the line that calls the client


def _silent(_: str) -> None:
    pass
