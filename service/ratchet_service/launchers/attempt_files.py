"""The files of an attempt, for all launchers: writes ``launch.json`` and the marker of the end, and reads the agents' files, with
size limits, since user code may have written them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from ratchet_contract.atomic_write import ensure_dir, fsync_path, write_atomic
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.messages import AgentFile, AttemptResult, LaunchFile
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.isolation.file_access import as_owner, is_foreign, open_read
from ratchet_service.launchers.base import AttemptRef, NodeState

MOST_BYTES: Final = 4 << 20
"""The most bytes to read of a file: results of a thousand ranks, each with a stack trace, are about 2 MiB."""
MOST_TEXT: Final = 16_000
"""The most characters to keep of one text."""
_REPLACED: Final = frozenset({errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENXIO})
"""Errors that say that user code has put something else in the place of a file or a directory."""


def read_bounded(path: Path) -> bytes | None:
    """Return the first bytes of the file, at most ``MOST_BYTES + 1``; None if it is not a regular file. Raises ``OSError``."""
    with as_owner(path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        return file.read(MOST_BYTES + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else None


def read_result(path: Path, job_id: str, attempt: int, node: int) -> AttemptResult | None:
    """Return the result that a node's agent has written, with long texts cut; None without a readable, valid result of this job,
    attempt and node. A file that is too large, for instance, gives a result of unknown cause."""
    try:
        data = read_bounded(path)
    except OSError:
        return None
    if data is None:
        return None
    if len(data) > MOST_BYTES:
        return _oversized_result(path, job_id, attempt, node)
    try:
        result = AttemptResult.model_validate_json(data)
        return cut(result) if (result.job_id, result.attempt, result.node) == (job_id, attempt, node) else None
    except ValidationError:
        return _parse_other_protocol_result(data, path, job_id, attempt, node)


def _parse_other_protocol_result(data: bytes, path: Path, job_id: str, attempt: int, node: int) -> AttemptResult | None:
    """Return the common fields of a result in another protocol version, or a result of unknown cause; None if ``data`` is no such
    result."""
    try:
        data_fields = json.loads(data)
        protocol = data_fields["protocol"]
        own = not isinstance(protocol, int) or protocol == PROTOCOL_VERSION
        if own or (data_fields["job_id"], data_fields["attempt"], data_fields["node"]) != (job_id, attempt, node):
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    known = {
        key: value
        for key, value in data_fields.items()
        if key in ("cause", "rank", "exit_code", "message", "last_step")
    }
    now = datetime.now(UTC).isoformat()
    times = {"started_at": data_fields.get("started_at", now), "ended_at": data_fields.get("ended_at", now)}
    place = {"job_id": job_id, "attempt": attempt, "node": node}
    try:
        ranks = [{key: one[key] for key in ("rank", "exit_code", "last_step")} for one in data_fields["ranks"]]
        return cut(AttemptResult.model_validate({**known, **times, **place, "ranks": ranks}))
    except (ValidationError, KeyError, TypeError):
        text = f"{path.name} of node {node} uses protocol {protocol!r}, which this service ({PROTOCOL_VERSION}) cannot read"
        return _unknown_result(text, job_id, attempt, node)


def cut(result: AttemptResult) -> AttemptResult:
    """Return ``result`` with each text cut to ``MOST_TEXT`` characters, and a note of what is left out."""
    plain = result.model_dump(mode="json")
    short = _truncate(plain)
    return result if short == plain else AttemptResult.model_validate(short)


def _truncate(value: Any) -> Any:
    """Return a copy of JSON data in which texts longer than ``MOST_TEXT`` characters are cut and say so."""
    if isinstance(value, str) and len(value) > MOST_TEXT:
        return f"{value[:MOST_TEXT]} ... ({pluralize(len(value) - MOST_TEXT, 'more character')} left out)"
    if isinstance(value, dict):
        return {key: _truncate(one) for key, one in value.items()}
    return [_truncate(one) for one in value] if isinstance(value, list) else value


def _oversized_result(path: Path, job_id: str, attempt: int, node: int) -> AttemptResult:
    """Return the result of unknown cause that stands for a ``result.json`` that is too large to be read."""
    text = f"{path.name} of node {node} has more than {MOST_BYTES >> 20} MiB, which no agent writes: it was not read"
    return _unknown_result(text, job_id, attempt, node)


def _unknown_result(text: str, job_id: str, attempt: int, node: int) -> AttemptResult:
    """Return a result of unknown cause with the message ``text``, without ranks; it starts and ends at the current time."""
    now = datetime.now(UTC).isoformat()
    return AttemptResult(
        job_id=job_id, attempt=attempt, node=node, cause=Cause.UNKNOWN, message=text, last_step=0, started_at=now, ended_at=now,
        ranks=[],
    )  # fmt: skip


M = TypeVar("M", bound=BaseModel)


def write_launch(paths: AttemptPaths, launch: LaunchFile) -> None:
    """Write ``launch.json`` atomically and durably, readable by its owner alone, and create the attempt's directory. Raises
    ``OSError``."""
    with as_owner(paths.root):
        ensure_dir(paths.root)
        write_atomic(paths.launch_file, launch.model_dump_json(indent=1).encode(), durable=True, mode=0o600)
    fsync_path(paths.root.parents[2])  # the name of the job's directory: a submission does not wait for the disk


def fence(paths: AttemptPaths) -> None:
    """Create the marker file that declares the attempt over: no agent of it starts after that, and running agents end once they
    see it. Raises ``OSError``, except where user code has closed or replaced the directory: then the marker may be missing."""
    with as_owner(paths.root):
        try:
            _fence(paths)
        except OSError:
            for folder in (paths.root.parent.parent, paths.root.parent, paths.root):
                with suppress(OSError):
                    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o700)
            try:
                paths.fence_file.unlink(missing_ok=True)
                _fence(paths)
            except OSError as error:
                # no agent can start from a directory that user code closed or replaced, and running agents must still be ended
                if not is_foreign(paths.root) and error.errno not in _REPLACED:
                    raise


def _fence(paths: AttemptPaths) -> None:
    """Create the attempt's directory and the marker file in it. Raises ``OSError``."""
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.fence_file.touch()


def node_states(
    ref: AttemptRef, *, gone: Callable[[int], bool] = lambda _node: False, notes: Mapping[int, str] | None = None
) -> tuple[NodeState, ...]:
    """Return the state of each node, in node order, from its agent's files. ``gone(node)``: True if a started agent
    no longer runs. ``notes``: the engine's messages."""
    return tuple(_node_state(ref, i, gone, (notes or {}).get(i)) for i in range(ref.nodes))


def _node_state(ref: AttemptRef, node: int, gone: Callable[[int], bool], note: str | None) -> NodeState:
    """Return the state of one node. The parameters are as in ``node_states``."""
    paths = ref.paths.node(node)
    agent = read_message(paths.agent_file, AgentFile)
    if agent is None:
        return NodeState(note=note)
    ended = gone(node)  # checked first: if the agent is gone, its result was written before
    return NodeState(True, ended, agent, read_result(paths.result_file, ref.job_id, ref.attempt, node), note)


def agent_logs(ref: AttemptRef, limit: int) -> str:
    """Return the ends of the agents' logs as one text of at most ``limit`` characters; empty if there is none."""
    parts = []
    for node in range(ref.nodes):
        text = tail(ref.paths.node(node).agent_log, limit // ref.nodes)
        if text:
            parts.append(f"node {node}: {text}" if ref.nodes > 1 else text)
    return "\n".join(parts)[-limit:]


def tail(path: Path, limit: int) -> str:
    """Return the last ``limit`` characters of a text file, stripped of white space; empty if the file cannot be read."""
    try:
        with open_read(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * limit))
            return file.read(4 * limit).decode(errors="replace").strip()[-limit:]
    except OSError:
        return ""


def read_message(path: Path, model: type[M]) -> M | None:
    """Return the message in ``path``; None if there is no readable, valid message."""
    try:
        data = read_bounded(path)
        return None if data is None or len(data) > MOST_BYTES else model.model_validate_json(data)
    except (OSError, ValidationError):
        return None


def lock_is_held(path: Path) -> bool:
    """True if a live process is seen to hold the exclusive lock on the file. False if none does, and also if user code has
    replaced the file or keeps it from being opened. A starting agent could not take its lock during the call. Raises
    ``OSError``."""
    try:
        with as_owner(path):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except PermissionError:
                path.chmod(0o600)
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        if is_foreign(path) or error.errno in _REPLACED:  # its processes can also be found by their environment
            return False
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
