"""The job's code on a node that does not have it: fetched from the service by digest, unpacked, verified, and only then there."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple, cast

from ratchet_contract import code_tree
from ratchet_contract.code_archive import BadArchive, unpack
from ratchet_contract.code_tree import TreeError
from ratchet_contract.errors import UserError
from ratchet_contract.messages import LaunchFile
from ratchet_contract.phases import Cause
from ratchet_worker.files import say
from ratchet_worker.meeting import Patience
from ratchet_worker.results import Conclusion, NotStarted
from ratchet_worker.service_link import Denied, Fenced, ServiceLink, Unreachable


class _Wanted(NamedTuple):
    """``one_file``: the file to start from, which may have any size."""

    digest: str
    place: Path
    one_file: bool


def provide(launch: LaunchFile, patience: Patience, insist: Callable[[], None]) -> str | None:
    """Fetch what of the job's code and start file this node lacks. Returns the digest of code that lies on the nodes
    (``code.source``), else None. ``insist`` raises what ends a wait.

    Raises ``NotStarted``; ``UserError`` for code that should lie here and does not.
    """
    resolved, wanted = launch.resolved, []
    if launch.code_dir is not None and resolved.code_digest is not None:
        wanted.append(_Wanted(resolved.code_digest, Path(launch.code_dir), False))
    if launch.start_file is not None and resolved.start_digest is not None:
        wanted.append(_Wanted(resolved.start_digest, Path(launch.start_file).parent, True))
    for each in wanted:
        if not each.place.is_dir():
            _fetch(launch, each, patience, insist)
    if launch.spec.code is None or launch.spec.code.source != "nodes":
        return None
    return _digest_here(launch)


def _fetch(launch: LaunchFile, wanted: _Wanted, patience: Patience, insist: Callable[[], None]) -> None:
    link, reason = ServiceLink(launch), ""

    def attempt() -> bool | None:
        nonlocal reason
        try:
            with link.fetch(f"code/{wanted.digest}") as body:
                unpack(cast(IO[bytes], _Body(body, insist)), wanted.digest, wanted.place, one_file=wanted.one_file)
            return True
        except Unreachable as error:
            reason = str(error)
            return None

    what = f"the code with the digest {wanted.digest[:16]} for {wanted.place}"
    try:
        done = patience(attempt)
    except Fenced as error:
        raise NotStarted(Conclusion(Cause.LEASE_LOST, None, None, str(error))) from None
    except (Denied, BadArchive, OSError) as error:
        raise _in_vain(f"{what} cannot be had from the service: {error}") from None
    if done is None:
        seconds = f"{launch.deadlines.meeting:g} s"
        raise _in_vain(f"{what} was not had from the service within startup_deadline ({seconds}): {reason}")
    say(f"fetched {wanted.place}")


def _in_vain(text: str) -> NotStarted:
    return NotStarted(Conclusion(Cause.LAUNCHER_ERROR, None, None, text))


class _Body:
    """An answer's body for ``tarfile``. A connection that breaks is the service's absence, not a damaged archive."""

    def __init__(self, answer: http.client.HTTPResponse, insist: Callable[[], None]) -> None:
        self._answer, self._insist = answer, insist

    def read(self, size: int) -> bytes:
        self._insist()
        try:
            data = self._answer.read(size)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"the code was cut short: {type(error).__name__}: {error}") from None
        if not data and self._answer.length:  # of this http.client says nothing
            raise Unreachable(f"the code was cut short by {self._answer.length} bytes")
        return data


def _digest_here(launch: LaunchFile) -> str:
    root = Path(launch.code_dir or "")
    if launch.code_dir is None or not root.is_dir():
        raise UserError(f"code.path: node {launch.node} has no directory {launch.code_dir}, and code.source is nodes")
    try:
        return code_tree.digest(code_tree.entries(root))
    except OSError as error:  # a volume that is away for a while is no fault of the user's
        raise _in_vain(f"code.path on node {launch.node} cannot be read: {error}") from None
    except TreeError as error:
        if error.code == "unreadable":
            raise _in_vain(f"code.path on node {launch.node}: {error.detail}") from None
        raise UserError(f"code.path on node {launch.node}: {error.detail}") from None
