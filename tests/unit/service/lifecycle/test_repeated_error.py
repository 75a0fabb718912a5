"""Which two ends are the same error at the same line: by the traceback, whatever rank it comes from."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_contract.protocol.attempt_cause import EndSeen
from ratchet_contract.protocol.messages import AttemptResult, RankEnd, RankResult
from ratchet_service.db.models import Attempt
from ratchet_service.lifecycle.repeated_error import repeated_error_step

NOW = "2026-01-01T00:00:00Z"


def trace(line: int, text: str) -> str:
    return f'Traceback (most recent call last):\n  File "/code/train.py", line {line}, in <module>\n    f()\n{text}\n'


def result(
    text: str, line: int | None = 7, rank: int = 0, cause: Cause = Cause.EXCEPTION, step: int = 0, other: int = 0
) -> AttemptResult:
    """``step``: the last one of the rank that raised; ``other``: of another."""
    told = None if line is None else trace(line, text)
    end = RankResult(rank=rank, cause=cause, at=NOW, last_step=step, message=text, traceback=told)
    ranks = [
        RankEnd(rank=rank, exit_code=1, last_step=step, result=end),
        RankEnd(rank=5, exit_code=None, last_step=other),
    ]
    last = max(step, other)
    return AttemptResult(
        job_id="j", attempt=1, cause=cause, rank=rank, last_step=last, started_at=NOW, ended_at=NOW, ranks=ranks
    )


def row(told: AttemptResult, **columns: Any) -> Attempt:
    given = {
        "cause": told.cause,
        "rank": told.rank,
        "last_step": told.last_step,
        "results": {"0": told.model_dump(mode="json")},
    }
    return Attempt(**given | columns)


def ran(seconds: float) -> dict[str, Any]:
    begun = datetime.fromisoformat(NOW)
    return {"begun_at": begun, "ended_at": begun + timedelta(seconds=seconds)}


def same(first: Attempt | None, second: AttemptResult) -> bool:
    return repeated_error_step(EndSeen(second.cause, rank=second.rank), [second], first) is not None


def test_repeated_error_matches_same_line_and_class() -> None:
    text = "TypeError: f() takes 0 positional arguments but 1 was given"
    assert same(row(result(text)), result(text)) and same(row(result(text, rank=1)), result(text))
    assert same(row(result("ValueError: <A object at 0x7f01>")), result("ValueError: <A object at 0x7f99>"))
    missing = "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/{}/train.bin'"
    assert same(row(result(missing.format("tmpa8x"))), result(missing.format("tmpq1z")))
    assert same(row(result("KeyError")), result("KeyError: 'rank 1'", rank=1))
    assert same(row(result(text, step=4), base_step=4), result(text, step=4))
    assert same(row(result(text, step=7), base_step=4), result(text, step=7))
    assert same(row(result(text, other=1)), result(text)), "it is the step of the rank that raised that counts"
    assert same(row(result(text), **ran(600), resume_report={"verdict": "fresh"}), result(text))
    assert same(row(result(text), **ran(10), resume_report={"verdict": "unmanaged"}), result(text))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (None, result("TypeError: a")),
        (row(result("TypeError: a", 8)), result("TypeError: a", 7)),
        (row(result("ValueError: a")), result("TypeError: a")),
        (row(result("TypeError: a", None)), result("TypeError: a", None)),
        (row(result("TypeError: a", cause=Cause.OOM)), result("TypeError: a")),
        (row(result("TypeError: a")), result("TypeError: a", cause=Cause.CHECKPOINT_ERROR)),
        (row(result("TypeError: a", step=5), base_step=4), result("TypeError: a", step=4)),
        (row(result("TypeError: a"), results={}), result("TypeError: a")),
        *[
            (row(result(passing)), result(passing))
            for passing in (
                "ConnectionRefusedError: [Errno 111] Connection refused",
                "TimeoutError: timed out",
                "DistNetworkError: no",
                "RuntimeError: CUDA error: an illegal memory access was encountered",
                "gaierror: [Errno -3] Temporary failure in name resolution",
                "gaierror: [Errno -2] Name or service not known",
                "OSError: We couldn't connect to 'https://huggingface.co' to load this file",
                "OSError: [Errno 28] No space left on device",
                "OSError: [Errno 98] Address already in use",
                "OSError: [Errno 113] No route to host",
                "RuntimeError: No CUDA GPUs are available",
            )
        ],
        (row(result("OSError: [Errno 24] Too many open files: 'a'")), result("OSError: [Errno 28] No space left: 'a'")),
        (row(result("OSError: [Errno 5] Input/output error")), result("OSError: [Errno 2] No such file or directory")),
        (row(result("OSError: [Errno 2] No such file or directory")), result("OSError: [Errno 116] Stale file handle")),
        (row(result("TypeError: a"), **ran(600), resume_report={"verdict": "unmanaged"}), result("TypeError: a")),
    ],
)
def test_repeated_error_does_not_match_different_errors(first: Attempt | None, second: AttemptResult) -> None:
    assert not same(first, second)
