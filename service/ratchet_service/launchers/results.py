"""What an agent's files say, read with bounds: the user that an attempt runs as may write anything there, of any size.

A ``result.json`` that is larger than a real one can be is not parsed. It counts as an end whose cause nobody knows, and the
attempt's message tells why; a text in it that is longer than a person would read is cut, and says so at its end.
"""

from __future__ import annotations

import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from ratchet_contract.messages import AttemptResult
from ratchet_contract.phases import Cause
from ratchet_contract.plural import counted
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.file_owner import as_owner

MOST_BYTES: Final = 4 << 20
"""Of a file: a thousand ranks' ends with a stack each are some 2 MiB."""
MOST_TEXT: Final = 16_000
"""Characters of one text."""


def read_bounded(path: Path) -> bytes | None:
    """The file, or its first ``MOST_BYTES + 1`` bytes; None for what is no regular file, which might never end or never begin.
    Raises ``OSError``."""
    with as_owner(path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        return file.read(MOST_BYTES + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else None


def read_result(path: Path, job_id: str, epoch: int, node: int) -> AttemptResult | None:
    """None where there is none of this attempt. Written by rename, so one that cannot be understood was never an agent's."""
    try:
        data = read_bounded(path)
    except OSError:
        return None
    if data is None:
        return None
    if len(data) > MOST_BYTES:
        return _unread(path, job_id, epoch, node)
    try:
        result = AttemptResult.model_validate_json(data)
        return cut(result) if (result.job_id, result.epoch, result.node) == (job_id, epoch, node) else None
    except ValidationError:
        return _of_another_protocol(data, path, job_id, epoch, node)


def _of_another_protocol(data: bytes, path: Path, job_id: str, epoch: int, node: int) -> AttemptResult | None:
    """What can be understood of a result that an agent of another protocol has written; None: nobody has."""
    try:
        found = json.loads(data)
        protocol = found["protocol"]
        own = not isinstance(protocol, int) or protocol == PROTOCOL_VERSION
        if own or (found["job_id"], found["epoch"], found["node"]) != (job_id, epoch, node):
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    known = {
        key: value for key, value in found.items() if key in ("cause", "rank", "exit_code", "message", "last_step")
    }
    now = datetime.now(UTC).isoformat()
    times = {"started_at": found.get("started_at", now), "ended_at": found.get("ended_at", now)}
    place = {"job_id": job_id, "epoch": epoch, "node": node}
    try:
        ranks = [{key: one[key] for key in ("rank", "exit_code", "last_step")} for one in found["ranks"]]
        return cut(AttemptResult.model_validate({**known, **times, **place, "ranks": ranks}))
    except (ValidationError, KeyError, TypeError):
        text = f"{path.name} of node {node} is in protocol {protocol!r}, which this service ({PROTOCOL_VERSION}) cannot read"
        return _unknown(text, job_id, epoch, node)


def cut(result: AttemptResult) -> AttemptResult:
    """The same with its long texts cut."""
    plain = result.model_dump(mode="json")
    short = _cut(plain)
    return result if short == plain else AttemptResult.model_validate(short)


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MOST_TEXT:
        return f"{value[:MOST_TEXT]} ... ({counted(len(value) - MOST_TEXT, 'more character')} left out)"
    if isinstance(value, dict):
        return {key: _cut(one) for key, one in value.items()}
    return [_cut(one) for one in value] if isinstance(value, list) else value


def _unread(path: Path, job_id: str, epoch: int, node: int) -> AttemptResult:
    text = f"{path.name} of node {node} has more than {MOST_BYTES >> 20} MiB, which no agent writes: it was not read"
    return _unknown(text, job_id, epoch, node)


def _unknown(text: str, job_id: str, epoch: int, node: int) -> AttemptResult:
    now = datetime.now(UTC).isoformat()
    return AttemptResult(
        job_id=job_id, epoch=epoch, node=node, cause=Cause.UNKNOWN, message=text, last_step=0, started_at=now, ended_at=now,
        ranks=[],
    )  # fmt: skip
