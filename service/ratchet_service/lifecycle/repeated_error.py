"""Detects that an attempt ended with the same error as the previous one, at the same line of the same step. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from ratchet_contract.phases import Cause
from ratchet_contract.protocol.attempt_cause import EndSeen
from ratchet_contract.protocol.messages import AttemptResult
from ratchet_service.db.models import Attempt
from ratchet_service.lifecycle import unmanaged_script
from ratchet_service.lifecycle.decide import MAX_BACKOFF

_FRAME: Final = re.compile(r'^ *File "([^"\n]*)", line (\d+)', re.MULTILINE)
_KIND: Final = re.compile(r"[^:\n]*(?:: \[Errno -?\d+\])?")
_TRANSIENT: Final = re.compile(
    r"^OSError|[Cc]onnect|Time(d ?)?[Oo]ut|timed out|Network|HTTP|Unavailable|Dist\w*Error|NCCL|Temporary|No route|not known|"
    r"CUDA error|No CUDA GPUs|Stale"
)
"""Errors of a network, a device or a shared file system, which may be gone a minute later. ``OSError`` by that name alone is the
system's for errors without a class of their own (a full disk, an address in use), and that of libraries which load models from
the network."""


class Raised(NamedTuple):
    """One rank's exception, reduced to the parts that are compared. ``kind``: the class name, with the errno if the message has
    one. ``step``: the last step that the rank finished. ``frames``: file and line of each frame of the traceback."""

    kind: str
    step: int
    frames: tuple[tuple[str, str], ...]


def repeated_error_step(end: EndSeen, results: Iterable[AttemptResult], previous: Attempt | None) -> int | None:
    """Return the last step that the failed rank had finished, if the attempt ended with the same error as ``previous``; otherwise
    None. Errors that may be transient, such as those of a network, never count as the same. If ``previous`` was a script without
    a Session that ran for long, no error counts as the same."""
    if (
        end.cause is not Cause.EXCEPTION
        or previous is None
        or previous.cause is not Cause.EXCEPTION
        or _ran_long_unmanaged(previous)
    ):
        return None
    now = _raised_error(end.rank, [result.model_dump(mode="json") for result in results])
    return now.step if now is not None and now == _raised_error(previous.rank, previous.results.values()) else None


def _ran_long_unmanaged(previous: Attempt) -> bool:
    """True if the attempt was a script without a Session that ran for at least ``MAX_BACKOFF`` seconds."""
    if (
        previous.begun_at is None
        or previous.ended_at is None
        or not unmanaged_script.is_reported_unmanaged(previous.resume_report)
    ):
        return False
    return (previous.ended_at - previous.begun_at).total_seconds() >= MAX_BACKOFF


def _raised_error(rank: int | None, results: Iterable[dict[str, Any]]) -> Raised | None:
    """Return the error with which the rank ended, from ``results`` (as JSON); None if it is unknown or transient."""
    ends = [end for result in results for end in result["ranks"] if end["rank"] == rank and end["result"] is not None]
    if not ends or not ends[0]["result"]["traceback"]:
        return None
    text = ends[0]["result"]["message"] or ""
    frames = tuple(_FRAME.findall(ends[0]["result"]["traceback"]))
    kind = _KIND.match(text)
    return (
        None if _TRANSIENT.search(text) or not frames or kind is None else Raised(kind[0], ends[0]["last_step"], frames)
    )
