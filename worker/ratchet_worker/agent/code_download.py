"""Fetches the job's code, and the file of ``start_from``, from the service by digest, on a node that lacks them. With
``code.source: nodes``, each node has the code already; then only its digest is computed."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple, cast

from ratchet_contract.code import tree
from ratchet_contract.code.archive import BadArchive, unpack
from ratchet_contract.code.tree import TreeError
from ratchet_contract.errors import UserError
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_worker.agent.rendezvous import WaitUntil
from ratchet_worker.agent.service_client import Denied, Fenced, ServiceLink, Unreachable
from ratchet_worker.ipc.log_lines import log_message
from ratchet_worker.ipc.result_files import Conclusion, NotStarted


class _Wanted(NamedTuple):
    """A directory to fetch, by the digest of its content. ``one_file``: the directory has a single file, that of
    ``start_from``."""

    digest: str
    target: Path
    one_file: bool


def download_code(launch: LaunchFile, wait_until: WaitUntil, raise_if_over: Callable[[], None]) -> str | None:
    """Fetch the job's code, and the file of ``start_from``, if this node lacks them. Blocks. Returns the digest of this node's
    code if ``code.source`` is ``nodes``, else None. Raises ``NotStarted``, or ``UserError`` if this node's code is missing or
    unusable."""
    resolved, wanted = launch.resolved, []
    if launch.code_dir is not None and resolved.code_digest is not None:
        wanted.append(_Wanted(resolved.code_digest, Path(launch.code_dir), False))
    if launch.start_file is not None and resolved.start_digest is not None:
        wanted.append(_Wanted(resolved.start_digest, Path(launch.start_file).parent, True))
    for each in wanted:
        if not each.target.is_dir():
            _fetch(launch, each, wait_until, raise_if_over)
    if launch.spec.code is None or launch.spec.code.source != "nodes":
        return None
    return _local_code_digest(launch)


def _fetch(launch: LaunchFile, wanted: _Wanted, wait_until: WaitUntil, raise_if_over: Callable[[], None]) -> None:
    """Download and unpack one directory to ``wanted.target``, and retry until the deadline while the service is unreachable.
    Raises ``NotStarted``."""
    link, reason = ServiceLink(launch), ""

    def attempt() -> bool | None:
        """Try the download once. True if it is complete, None to try again because the service is unreachable."""
        nonlocal reason
        try:
            with link.fetch(f"code/{wanted.digest}") as body:
                unpack(
                    cast(IO[bytes], _Body(body, raise_if_over)), wanted.digest, wanted.target, one_file=wanted.one_file
                )
            return True
        except Unreachable as error:
            reason = str(error)
            return None

    kind = "file of start_from" if wanted.one_file else "code"
    what = f"the {kind} with the digest {wanted.digest[:16]} for {wanted.target}"
    try:
        done = wait_until(attempt)
    except Fenced as error:
        raise NotStarted(Conclusion(Cause.LEASE_LOST, None, None, str(error))) from None
    except (Denied, BadArchive, OSError) as error:
        raise _launcher_error(f"{what} cannot be downloaded from the service: {error}") from None
    if done is None:
        seconds = f"{launch.deadlines.rendezvous:g} s"
        raise _launcher_error(
            f"{what} was not downloaded from the service within startup_deadline ({seconds}): {reason}"
        )
    log_message(f"fetched {wanted.target}")


def _launcher_error(text: str) -> NotStarted:
    """A ``NotStarted`` with the cause launcher-error and the message ``text``, for the caller to raise."""
    return NotStarted(Conclusion(Cause.LAUNCHER_ERROR, None, None, text))


class _Body:
    """A response body as a file for ``tarfile``. A broken connection raises ``Unreachable``."""

    def __init__(self, response: http.client.HTTPResponse, raise_if_over: Callable[[], None]) -> None:
        self._response, self._raise_if_over = response, raise_if_over

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes of the body, none at its end. Raises ``Unreachable`` if the connection ends early, and as
        ``raise_if_over``."""
        self._raise_if_over()
        try:
            data = self._response.read(size)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"the download was cut short: {type(error).__name__}: {error}") from None
        if not data and self._response.length:  # http.client reports no error here
            raise Unreachable(f"the download was cut short by {self._response.length} bytes")
        return data


def _local_code_digest(launch: LaunchFile) -> str:
    """Return the digest of the code directory on this node. Raises ``UserError`` or ``NotStarted`` if there is no usable one."""
    root = Path(launch.code_dir or "")
    if launch.code_dir is None or not root.is_dir():
        raise UserError(f"code.path: node {launch.node} has no directory {launch.code_dir}, and code.source is nodes")
    try:
        return tree.tree_digest(tree.list_entries(root))
    except OSError as error:  # a temporarily missing volume is not the user's error
        raise _launcher_error(f"code.path on node {launch.node} cannot be read: {error}") from None
    except TreeError as error:
        if error.code == "unreadable":
            raise _launcher_error(f"code.path on node {launch.node}: {error.detail}") from None
        raise UserError(f"code.path on node {launch.node}: {error.detail}") from None
