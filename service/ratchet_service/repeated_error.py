"""Has an attempt ended with the error of the one before, at the same line of the same step? No retry heals that. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from ratchet_contract.messages import AttemptResult
from ratchet_contract.outcome import EndSeen
from ratchet_contract.phases import Cause
from ratchet_service import unmanaged
from ratchet_service.decide import MAX_BACKOFF
from ratchet_service.models import Attempt

_FRAME: Final = re.compile(r'^ *File "([^"\n]*)", line (\d+)', re.MULTILINE)
_KIND: Final = re.compile(r"[^:\n]*(?:: \[Errno -?\d+\])?")
_PASSING: Final = re.compile(
    r"^OSError|[Cc]onnect|Time(d ?)?[Oo]ut|timed out|Network|HTTP|Unavailable|Dist\w*Error|NCCL|Temporary|No route|not known|"
    r"CUDA error|No CUDA GPUs|Stale"
)
"""What a network, a device or a shared file system says, which may be well a minute later. ``OSError`` by that name alone is the
system's without a class of its own (a full disk, an address in use), and that of libraries which load models from the network."""


class Raised(NamedTuple):
    """An exception's class (of the system's errors with their number), the last step that its rank had finished, and file and
    line of every frame of its traceback. Not its text, which may have a temporary path, a time or a rank's number in it."""

    kind: str
    step: int
    frames: tuple[tuple[str, str], ...]


def repeated(seen: EndSeen, results: Iterable[AttemptResult], before: Attempt | None) -> int | None:
    """The last step that the rank of the error had finished, whatever other ranks had; None where it is not the error of
    ``before``, the row of the attempt before, which has ended. ``seen``: the attempt's end, out of ``results``."""
    if (
        seen.cause is not Cause.EXCEPTION
        or before is None
        or before.cause is not Cause.EXCEPTION
        or _ran_unseen(before)
    ):
        return None
    now = _raised(seen.rank, [result.model_dump(mode="json") for result in results])
    return now.step if now is not None and now == _raised(before.rank, before.results.values()) else None


def _ran_unseen(before: Attempt) -> bool:
    """Did a script without a Session, of which no step is seen, run for longer than the start of one takes?"""
    if before.begun_at is None or before.ended_at is None or not unmanaged.reported(before.resume_report):
        return False
    return (before.ended_at - before.begun_at).total_seconds() >= MAX_BACKOFF


def _raised(rank: int | None, results: Iterable[dict[str, Any]]) -> Raised | None:
    """None where the rank's end has no traceback, or where the error may pass by itself."""
    ends = [end for result in results for end in result["ranks"] if end["rank"] == rank and end["result"] is not None]
    if not ends or not ends[0]["result"]["traceback"]:
        return None
    text = ends[0]["result"]["message"] or ""
    frames = tuple(_FRAME.findall(ends[0]["result"]["traceback"]))
    kind = _KIND.match(text)
    return (
        None if _PASSING.search(text) or not frames or kind is None else Raised(kind[0], ends[0]["last_step"], frames)
    )
